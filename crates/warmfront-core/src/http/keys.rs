//! Keys of clients: only their hashes are known here.
//!
//! A key is 256 random bits, so its SHA-256 is as hard to turn back as the key is to guess, and a slow hash with salt, as
//! passwords need, would add nothing but its cost to every request. A key is found by its hash: how long that takes tells
//! about hashes and not about keys. `warmfront keys` writes the file.

use std::collections::HashMap;
use std::sync::Arc;

use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use ring::digest;
use serde::Deserialize;
use subtle::ConstantTimeEq as _;

use super::headers::API_KEY;
use super::watched::read;
use crate::error::CoreError;

/// A larger file is no file of keys.
const FILE_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Longest flow and name, as of flows in headers.
const NAME_BYTES_MAX: usize = 128;
/// Bytes of a SHA-256.
const DIGEST_BYTES: usize = 32;

/// SHA-256 of a secret. Compared in constant time.
#[derive(Clone, Copy, Debug, Eq)]
pub(crate) struct Digest([u8; DIGEST_BYTES]);

impl Digest {
    pub(crate) fn of(secret: &[u8]) -> Self {
        let hashed = digest::digest(&digest::SHA256, secret);
        Self(hashed.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }

    fn from_hex(text: &str) -> Option<Self> {
        let mut bytes = [0; DIGEST_BYTES];
        if text.len() != 2 * DIGEST_BYTES || !text.is_ascii() {
            return None;
        }
        for (place, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * place..2 * place + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl PartialEq for Digest {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl std::hash::Hash for Digest {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write(&self.0);
    }
}

/// What a key stands for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) name: Arc<str>,
    /// The flow its requests queue in, as a header value.
    pub(crate) flow: HeaderValue,
    /// Its requests are never more urgent than this, whatever they ask; `None`: as those of anybody.
    pub(crate) priority: Option<i64>,
}

/// All keys that are let in.
#[derive(Debug, Default)]
pub(crate) struct KeyTable(HashMap<Digest, Arc<Key>>);

/// The file, as `warmfront keys` writes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    keys: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    flow: String,
    sha256: String,
    #[serde(default)]
    priority: Option<i64>,
    /// For people: the first letters of the key, and when it was made.
    #[serde(rename = "prefix")]
    _prefix: Option<String>,
    #[serde(rename = "created")]
    _created: Option<String>,
}

impl KeyTable {
    /// Reads the file of keys.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or an entry is wrong; the error names the entry.
    pub(crate) fn load(path: &str) -> Result<Self, CoreError> {
        let failed = |reason: String| CoreError::File { path: path.to_owned(), reason };
        let file: File = serde_json::from_slice(&read(path, FILE_BYTES_MAX)?)
            .map_err(|error| failed(format!("line {}, column {}: not a file of keys", error.line(), error.column())))?;
        let mut table = HashMap::with_capacity(file.keys.len());
        for entry in file.keys {
            let digest = Digest::from_hex(&entry.sha256)
                .ok_or_else(|| failed(format!("the sha256 of key {:?} is not 64 hexadecimal digits", entry.name)))?;
            let flow = HeaderValue::from_str(&entry.flow)
                .ok()
                .filter(|flow| flow.to_str().is_ok() && (1..=NAME_BYTES_MAX).contains(&flow.len()))
                .ok_or_else(|| failed(format!("the flow of key {:?} is empty, too long or not plain", entry.name)))?;
            let key = Key { name: entry.name.into(), flow, priority: entry.priority };
            if let Some(other) = table.insert(digest, Arc::new(key)) {
                return Err(failed(format!("the key {:?} is listed twice", other.name)));
            }
        }
        Ok(Self(table))
    }

    /// The key with this text.
    pub(crate) fn find(&self, secret: &[u8]) -> Option<Arc<Key>> {
        self.0.get(&Digest::of(secret)).cloned()
    }
}

/// The key in a request's headers: `Authorization: Bearer`, or `x-api-key` as Anthropic's clients send it.
///
/// `None` also where a header is repeated: which of them counts would depend on who reads.
pub(crate) fn offered(headers: &HeaderMap) -> Option<&[u8]> {
    bearer(single(headers, &AUTHORIZATION)).or_else(|| single(headers, &API_KEY)).filter(|key| !key.is_empty())
}

pub(crate) fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a [u8]> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    values.next().is_none().then_some(first.as_bytes())
}

fn bearer(value: Option<&[u8]>) -> Option<&[u8]> {
    let (scheme, key) = value?.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of `abc`, from FIPS 180-4.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn table(content: &str) -> Result<KeyTable, CoreError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        KeyTable::load(file.path().to_str().unwrap())
    }

    #[test]
    fn a_key_is_found_by_its_hash() {
        let content =
            format!(r#"{{"keys":[{{"name":"a","flow":"team","sha256":"{ABC}","prefix":"a","priority":2}}]}}"#);
        let table = table(&content).unwrap();
        let key = table.find(b"abc").unwrap();
        assert_eq!((&*key.name, key.flow.to_str().unwrap(), key.priority), ("a", "team", Some(2)));
        for other in [&b"abd"[..], b"", b"abc ", ABC.as_bytes()] {
            assert_eq!(table.find(other), None);
        }
    }

    #[test]
    fn a_wrong_file_is_named_and_never_quoted() {
        let twice = format!(r#"{{"name":"a","flow":"f","sha256":"{ABC}"}}"#);
        for content in [
            "{\"keys\":[{\"name\":\"a\",\"flow\":\"f\",\"key\":\"plaintext-secret\"}]}".to_owned(),
            r#"{"keys":[{"name":"a","flow":"f","sha256":"plaintext-secret"}]}"#.to_owned(),
            format!(r#"{{"keys":[{{"name":"a","flow":"","sha256":"{ABC}"}}]}}"#),
            format!(r#"{{"keys":[{{"name":"a","flow":"a\nb","sha256":"{ABC}"}}]}}"#),
            format!(r#"{{"keys":[{twice},{twice}]}}"#),
            "plaintext-secret".to_owned(),
        ] {
            let error = table(&content).expect_err(&content).to_string();
            assert!(error.starts_with("cannot read ") && !error.contains("plaintext-secret"), "{error}");
        }
        assert!(table(r#"{"keys":[]}"#).unwrap().find(b"").is_none());
    }

    #[test]
    fn the_key_is_read_from_either_header_and_never_from_repeated_ones() {
        let headers = |pairs: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.append(*name, HeaderValue::from_static(value));
            }
            headers
        };
        for (given, key) in [
            (&[("authorization", "Bearer k1")][..], Some("k1")),
            (&[("authorization", "bearer  k1 ")], Some("k1")),
            (&[("x-api-key", "k2")], Some("k2")),
            (&[("authorization", "Basic abc"), ("x-api-key", "k2")], Some("k2")),
            (&[("authorization", "Bearer k1"), ("x-api-key", "k2")], Some("k1")),
            (&[("authorization", "Bearer k1"), ("authorization", "Bearer k2")], None),
            (&[("x-api-key", "k1"), ("x-api-key", "k1")], None),
            (&[("authorization", "Bearer ")], None),
            (&[("authorization", "Bear")], None),
            (&[], None),
        ] {
            assert_eq!(offered(&headers(given)), key.map(str::as_bytes), "{given:?}");
        }
    }
}

//! Who is let in, and what they may say about themselves.
//!
//! Everything is refused unless it is allowed: where keys are configured, every path but `/health` and `/ready` wants one,
//! known paths and unknown ones alike, before anything else looks at the request. Whoever passes may still not speak for
//! others: the flow, the priority and the address of a client are taken from headers only where a trusted peer sends
//! them, and are removed otherwise. A key's own flow and priority become the same headers, so that nothing behind this
//! module knows where they came from. What one would get wrong: no client ever chooses the rank of a server.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use http::HeaderMap;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, FORWARDED, HeaderName, HeaderValue, TRANSFER_ENCODING};
use parking_lot::Mutex;

use super::headers::{self, API_KEY, AZURE_API_KEY, EngineHeaders};
use super::keys::{Digest, Key, KeyTable, offered, single};
use super::routes;
use super::watched::{Watched, read};
use crate::config::{ForwardAuthorization, FrontConfig};
use crate::error::CoreError;

/// Carries the secret that a trusted gateway shares with us.
pub(crate) const GATEWAY_SECRET: HeaderName = HeaderName::from_static("x-warmfront-gateway-secret");

/// A longer file is no file with a secret.
const SECRET_BYTES_MAX: u64 = 4096;
/// Bits of an IPv6 address that one client is given; the rest are his own to vary.
const CLIENT_BITS_V6: u32 = 64;
const LOOPBACK: [&str; 2] = ["127.0.0.0/8", "::1/128"];

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    address: IpAddr,
    is_trusted: bool,
}

/// Who sends one request.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    peer: Peer,
    key: Option<Arc<Key>>,
}

/// Why a request is turned away at the door. The names are label values of `warmfront_refused_clients_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    NoKey,
    UnknownKey,
    /// Two statements of where the body ends, or a coding in which it cannot be passed on.
    Framing,
    TooManyStreams,
}

impl Denied {
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::NoKey => "no_key",
            Self::UnknownKey => "unknown_key",
            Self::Framing => "framing",
            Self::TooManyStreams => "too_many_streams",
        }
    }
}

/// See the module text.
#[derive(Debug)]
pub(crate) struct Access {
    keys: Option<Watched<KeyTable>>,
    networks: Vec<Network>,
    secret: Option<Watched<Digest>>,
    forwards_keys: bool,
    is_metrics_open: bool,
    engine_headers: EngineHeaders,
    shares: Arc<Shares>,
}

impl Access {
    /// # Errors
    ///
    /// A file cannot be read, or a network or header name is none.
    pub(crate) fn new(config: &FrontConfig) -> Result<Self, CoreError> {
        let keys = config
            .keys_file
            .clone()
            .map(|path| Watched::open("front.keys_file", vec![PathBuf::from(&path)], move || KeyTable::load(&path)));
        let secret = config.trusted_secret_file.clone().map(|path| {
            Watched::open("front.trusted_secret_file", vec![PathBuf::from(&path)], move || load_secret(&path))
        });
        let keys = keys.transpose()?;
        Ok(Self {
            networks: networks(config.trusted_networks.as_deref(), keys.is_some())?,
            secret: secret.transpose()?,
            forwards_keys: match config.forward_authorization {
                ForwardAuthorization::Auto => keys.is_none(),
                ForwardAuthorization::Always => true,
                ForwardAuthorization::Never => false,
            },
            keys,
            is_metrics_open: config.metrics_without_key,
            engine_headers: EngineHeaders::new(&config.headers)?,
            shares: Arc::default(),
        })
    }

    pub(crate) fn has_files(&self) -> bool {
        self.keys.is_some() || self.secret.is_some()
    }

    /// Reads files again that have changed. Blocks on the file system.
    pub(crate) fn refresh(&self) {
        if let Some(keys) = &self.keys {
            keys.refresh();
        }
        if let Some(secret) = &self.secret {
            secret.refresh();
        }
    }

    pub(crate) fn peer(&self, address: SocketAddr) -> Peer {
        let address = address.ip().to_canonical();
        Peer { address, is_trusted: self.networks.iter().any(|network| network.contains(address)) }
    }

    /// The one gate: every request passes here before its path means anything.
    pub(crate) fn admit(&self, peer: Peer, path: &str, headers: &HeaderMap) -> Result<Caller, Denied> {
        if headers.contains_key(TRANSFER_ENCODING) && !is_chunked_alone(headers) {
            return Err(Denied::Framing);
        }
        let Some(keys) = &self.keys else { return Ok(Caller { peer, key: None }) };
        if self.is_open(path) {
            return Ok(Caller { peer, key: None });
        }
        let offered = offered(headers).ok_or(Denied::NoKey)?;
        let key = keys.current().find(offered).ok_or(Denied::UnknownKey)?;
        Ok(Caller { peer, key: Some(key) })
    }

    fn is_open(&self, path: &str) -> bool {
        match routes::canonical(path) {
            "/health" | "/ready" => true,
            "/metrics" => self.is_metrics_open,
            _ => false,
        }
    }

    /// Removes what this caller may not say, and adds what its key says.
    pub(crate) fn clean(&self, caller: &Caller, headers: &mut HeaderMap) {
        headers.remove(headers::RANK);
        let is_trusted = caller.peer.is_trusted || self.has_secret(headers);
        headers.remove(GATEWAY_SECRET);
        if !is_trusted {
            remove_claims(headers);
        }
        if let Some(limit) = caller.priority_limit(is_trusted) {
            headers.insert(headers::PRIORITY_LIMIT, HeaderValue::from(limit));
        }
        if !self.forwards_keys {
            for name in [AUTHORIZATION, API_KEY, AZURE_API_KEY] {
                headers.remove(name);
            }
        }
        if let Some(key) = &caller.key {
            headers.insert(headers::FLOW, key.flow.clone());
        }
    }

    fn has_secret(&self, headers: &HeaderMap) -> bool {
        let Some(secret) = &self.secret else { return false };
        single(headers, &GATEWAY_SECRET).is_some_and(|given| Digest::of(given) == *secret.current())
    }

    /// Counts a request of this caller as running until the share is dropped.
    ///
    /// # Errors
    ///
    /// It has `max` running, as many as it may. A trusted peer without a key stands for many clients and has no such limit.
    pub(crate) fn share(&self, caller: &Caller, max: usize) -> Result<Option<Share>, Denied> {
        let client = match &caller.key {
            Some(key) => Client::Key(Arc::clone(&key.name)),
            None if caller.peer.is_trusted => return Ok(None),
            None => Client::Address(network_of(caller.peer.address)),
        };
        self.shares.take(client, max).map(Some)
    }

    /// What of a client's headers an engine gets.
    pub(crate) fn engine_headers(&self) -> &EngineHeaders {
        &self.engine_headers
    }
}

impl Caller {
    /// How urgent its requests may be at most, in header or body: what its key says, else the usual 0 where nobody vouches
    /// for it.
    fn priority_limit(&self, is_trusted: bool) -> Option<i64> {
        let limit = self.key.as_ref().and_then(|key| key.priority);
        limit.or((!is_trusted).then_some(0))
    }

    /// Whether the connection must end with this request: its body is framed by `Transfer-Encoding`, and a proxy before us
    /// that nobody vouches for may have framed it otherwise. A `Content-Length` behind it is not visible here.
    pub(crate) fn must_close(&self, headers: &HeaderMap) -> bool {
        !self.peer.is_trusted && headers.contains_key(TRANSFER_ENCODING)
    }
}

/// Whether `chunked`, once, is all that is said of the body's framing.
fn is_chunked_alone(headers: &HeaderMap) -> bool {
    let coding = single(headers, &TRANSFER_ENCODING);
    coding.is_some_and(|coding| coding.trim_ascii().eq_ignore_ascii_case(b"chunked"))
        && !headers.contains_key(CONTENT_LENGTH)
}

/// Removes the headers by which a gateway speaks for its clients.
fn remove_claims(headers: &mut HeaderMap) {
    let claims: Vec<HeaderName> = headers.keys().filter(|name| is_claim(name)).cloned().collect();
    for name in claims {
        headers.remove(name);
    }
}

/// How long a client waits is its own business, and no claim.
fn is_claim(name: &HeaderName) -> bool {
    let text = name.as_str();
    (text.starts_with("x-warmfront-") && *name != headers::TIMEOUT)
        || text.starts_with("x-forwarded-")
        || text == "x-real-ip"
        || *name == headers::PRIORITY
        || *name == FORWARDED
}

fn load_secret(path: &str) -> Result<Digest, CoreError> {
    read_secret(path).map(|secret| Digest::of(&secret))
}

/// A file's content without the white space around it. Blocks on the file system.
pub(crate) fn read_secret(path: &str) -> Result<Vec<u8>, CoreError> {
    let content = read(path, SECRET_BYTES_MAX)?;
    match content.trim_ascii() {
        b"" => Err(CoreError::File { path: path.to_owned(), reason: "it is empty".to_owned() }),
        secret => Ok(secret.to_vec()),
    }
}

/// The trusted networks. Not configured: this machine where no keys are, nobody where clients have keys.
fn networks(configured: Option<&[String]>, has_keys: bool) -> Result<Vec<Network>, CoreError> {
    let parse = |text: &str| {
        Network::parse(text)
            .ok_or_else(|| CoreError::Config(format!("front.trusted_networks: {text:?} is no network like 10.0.0.0/8")))
    };
    match configured {
        Some(networks) => networks.iter().map(|text| parse(text)).collect(),
        None if has_keys => Ok(vec![]),
        None => LOOPBACK.iter().map(|text| parse(text)).collect(),
    }
}

/// A range of addresses; IPv4 as IPv6 writes it.
#[derive(Clone, Copy, Debug)]
struct Network {
    base: u128,
    mask: u128,
}

impl Network {
    fn parse(text: &str) -> Option<Self> {
        let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address.parse().ok()?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Some(width), |bits| bits.parse().ok().filter(|bits| *bits <= width))?;
        let mask = mask(bits + 128 - width);
        Some(Self { base: number(address) & mask, mask })
    }

    fn contains(&self, address: IpAddr) -> bool {
        number(address) & self.mask == self.base
    }
}

fn number(address: IpAddr) -> u128 {
    let address = match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    address.to_bits()
}

fn mask(bits: u32) -> u128 {
    u128::MAX.checked_shl(128 - bits).unwrap_or(0)
}

fn network_of(address: IpAddr) -> u128 {
    if address.is_ipv4() { number(address) } else { number(address) & mask(CLIENT_BITS_V6) }
}

/// Whose requests are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Client {
    Key(Arc<str>),
    Address(u128),
}

/// Requests running now, by client. An entry lives as long as one of them.
#[derive(Debug, Default)]
struct Shares {
    taken: Mutex<HashMap<Client, usize>>,
}

impl Shares {
    fn take(self: &Arc<Self>, client: Client, max: usize) -> Result<Share, Denied> {
        let mut taken = self.taken.lock();
        let count = taken.get(&client).copied().unwrap_or(0);
        if count >= max {
            return Err(Denied::TooManyStreams);
        }
        taken.insert(client.clone(), count + 1);
        Ok(Share { shares: Arc::clone(self), client })
    }
}

/// One request's place among those of its client.
#[derive(Debug)]
pub(crate) struct Share {
    shares: Arc<Shares>,
    client: Client,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.shares.taken.lock();
        if let Some(count) = taken.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_inside(network: &str, address: &str) -> bool {
        Network::parse(network).unwrap().contains(address.parse::<IpAddr>().unwrap())
    }

    #[test]
    fn networks_hold_their_addresses_and_no_others() {
        assert!(is_inside("10.1.0.0/16", "10.1.255.255"));
        assert!(!is_inside("10.1.0.0/16", "10.2.0.0"));
        assert!(is_inside("10.1.2.3", "10.1.2.3") && !is_inside("10.1.2.3", "10.1.2.4"));
        assert!(is_inside("0.0.0.0/0", "8.8.8.8") && !is_inside("0.0.0.0/0", "2001:db8::1"));
        assert!(is_inside("::/0", "8.8.8.8"));
        assert!(is_inside("2001:db8::/32", "2001:db8:ffff::1") && !is_inside("2001:db8::/32", "2001:db9::"));
        assert!(is_inside("127.0.0.0/8", "::ffff:127.0.0.1"), "a dual-stack socket names IPv4 clients so");
        for wrong in ["", "10.0.0.0/33", "::/129", "host/8", "10.0.0.0/", "10.0.0.0/-1"] {
            assert!(Network::parse(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn a_share_is_given_back_when_dropped_and_leaves_nothing_behind() {
        let shares = Arc::<Shares>::default();
        let client = Client::Address(1);
        let held = [shares.take(client.clone(), 2).unwrap(), shares.take(client.clone(), 2).unwrap()];
        assert_eq!(shares.take(client.clone(), 2).unwrap_err(), Denied::TooManyStreams);
        assert!(shares.take(Client::Key("a".into()), 2).is_ok(), "others are not held up");
        drop(held);
        assert!(shares.take(client, 2).is_ok());
        assert!(shares.taken.lock().is_empty());
    }
}

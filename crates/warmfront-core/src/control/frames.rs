//! The frames of the control link.

use std::fmt;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::Question;
use crate::fleet::FleetUpdate;

/// A fleet of a thousand replicas is about a megabyte; a question carries at most a request body.
const FRAME_BYTES_MAX: u32 = 128 * 1024 * 1024;
/// Bytes read at a time, so that memory follows what really comes and not the length that was announced.
const CHUNK_BYTES: u64 = 256 * 1024;

/// What the control process says.
#[derive(Debug, PartialEq)]
pub(super) enum Incoming {
    Fleet(FleetUpdate),
    Ask { id: u64, question: Question },
    Stopping,
    Unknown(String),
}

#[derive(Deserialize)]
struct Message {
    r#type: String,
    #[serde(default)]
    update: Option<FleetUpdate>,
    #[serde(default)]
    id: u64,
    #[serde(default)]
    question: String,
    #[serde(default)]
    payload: Blob,
    #[serde(default)]
    path: String,
}

/// Reads one frame. The error says why the connection ends.
pub(super) async fn read_frame(reader: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, String> {
    let length = reader.read_u32().await.map_err(|error| error.to_string())?;
    if length > FRAME_BYTES_MAX {
        return Err(format!("a frame of {length} bytes is over the bound of {FRAME_BYTES_MAX}"));
    }
    let mut frame = Vec::new();
    while frame.len() < length as usize {
        let chunk = CHUNK_BYTES.min(u64::from(length) - frame.len() as u64);
        let read = (&mut *reader).take(chunk).read_to_end(&mut frame).await.map_err(|error| error.to_string())?;
        if read == 0 {
            return Err("the connection ended inside a frame".into());
        }
    }
    Ok(frame)
}

pub(super) fn decode(frame: &[u8]) -> Result<Incoming, String> {
    let message: Message = rmp_serde::from_slice(frame).map_err(|error| format!("a bad frame: {error}"))?;
    match message.r#type.as_str() {
        "fleet" => message.update.map(Incoming::Fleet).ok_or_else(|| "a bad frame: no update".into()),
        "ask" => {
            let question =
                Question { question: message.question, payload: Bytes::from(message.payload.0), path: message.path };
            Ok(Incoming::Ask { id: message.id, question })
        }
        "stopping" => Ok(Incoming::Stopping),
        _ => Ok(Incoming::Unknown(message.r#type)),
    }
}

/// `{"type": "hello", "serving": "host:port", "pid": n}`
pub(super) fn hello(serving: &str, pid: u32) -> Vec<u8> {
    Frame::of("hello", 3).text("serving").text(serving).text("pid").number(pid.into()).end()
}

/// `{"type": "state", "state": FleetState}`; the state is encoded already.
pub(super) fn state(encoded: &[u8]) -> Vec<u8> {
    Frame::of("state", 2).text("state").raw(encoded).end()
}

/// `{"type": "answer", "id": n, "status": n, "body": bytes}`
pub(super) fn answer(id: u64, status: u16, body: &[u8]) -> Vec<u8> {
    let frame = Frame::of("answer", 4).text("id").number(id).text("status").number(status.into());
    frame.text("body").bytes(body).end()
}

/// `{"type": "reload"}`: read the configuration again.
pub(super) fn reload() -> Vec<u8> {
    Frame::of("reload", 1).end()
}

/// `{"type": "stop"}`
pub(super) fn stop() -> Vec<u8> {
    Frame::of("stop", 1).end()
}

/// Writes a map into memory, which cannot fail.
struct Frame(Vec<u8>);

const IN_MEMORY: &str = "writing to memory does not fail";

impl Frame {
    fn of(kind: &str, fields: u32) -> Self {
        let mut bytes = vec![0; 4];
        rmp::encode::write_map_len(&mut bytes, fields).expect(IN_MEMORY);
        Self(bytes).text("type").text(kind)
    }

    fn text(mut self, text: &str) -> Self {
        rmp::encode::write_str(&mut self.0, text).expect(IN_MEMORY);
        self
    }

    fn number(mut self, number: u64) -> Self {
        rmp::encode::write_uint(&mut self.0, number).expect(IN_MEMORY);
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        rmp::encode::write_bin(&mut self.0, bytes).expect(IN_MEMORY);
        self
    }

    fn raw(mut self, encoded: &[u8]) -> Self {
        self.0.extend_from_slice(encoded);
        self
    }

    /// Fills in the length.
    fn end(mut self) -> Vec<u8> {
        let length = (self.0.len() - 4) as u32;
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0
    }
}

/// `MessagePack` bin; serde reads a plain `Vec<u8>` as an array.
#[derive(Debug, Default)]
pub(super) struct Blob(pub(super) Vec<u8>);

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_byte_buf(BlobVisitor)
    }
}

struct BlobVisitor;

impl<'de> Visitor<'de> for BlobVisitor {
    type Value = Blob;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("bytes")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Blob, E> {
        Ok(Blob(bytes.to_vec()))
    }

    fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<Blob, E> {
        Ok(Blob(bytes))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Blob, E> {
        Ok(Blob(text.as_bytes().to_vec()))
    }

    fn visit_unit<E: Error>(self) -> Result<Blob, E> {
        Ok(Blob::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Blob, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = sequence.next_element()? {
            bytes.push(byte);
        }
        Ok(Blob(bytes))
    }
}

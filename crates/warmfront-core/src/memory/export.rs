//! Handing the snapshot to another router, over the control link.
//!
//! The control process asks for one chunk after the other, each when its client has taken the one before: the client's
//! pace is ours, and no side holds more than a chunk. The snapshot is written to a file without a name first, so a slow
//! client holds disk and no lock.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::Memory;
use super::keep::blocking;
use crate::control::Reply;

/// Bytes of one chunk.
const CHUNK_BYTES: u64 = 256 * 1024;
/// Snapshots being handed out; each holds a file.
const EXPORTS_MAX: usize = 2;
/// An export that nobody asks about for so long is over.
const IDLE_S: f64 = 60.0;

/// Snapshots that are being handed out.
#[derive(Default)]
pub(super) struct Exports {
    next: AtomicU64,
    open: Mutex<Vec<Export>>,
}

struct Export {
    number: u64,
    file: Arc<File>,
    bytes: u64,
    used_s: f64,
}

/// What the control process asks; without fields: how memory is doing.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Ask {
    /// Write a snapshot to hand out.
    open: bool,
    /// Number of an export, for a chunk of it.
    export: Option<u64>,
    offset: u64,
    /// The export is not wanted any more.
    close: bool,
}

/// A snapshot to hand out.
#[derive(Serialize)]
struct Opened {
    export: u64,
    bytes: u64,
}

impl Memory {
    /// Answers `snapshot` of the control process.
    pub async fn answer(&self, payload: &[u8]) -> Reply {
        let ask: Ask = match payload {
            [] => Ask::default(),
            payload => match serde_json::from_slice(payload) {
                Ok(ask) => ask,
                Err(error) => return failed(400, &error.to_string()),
            },
        };
        match ask.export {
            Some(number) if ask.close => {
                self.exports.open.lock().retain(|export| export.number != number);
                (200, Bytes::new())
            }
            Some(number) => self.chunk(number, ask.offset).await,
            None if ask.open => self.begin_export().await,
            None => (200, json(&self.report())),
        }
    }

    async fn begin_export(&self) -> Reply {
        let now_s = self.parts.clock.now_s();
        self.exports.open.lock().retain(|export| now_s - export.used_s < IDLE_S);
        if self.exports.open.lock().len() >= EXPORTS_MAX {
            return failed(503, "other routers are being given the snapshot; try again");
        }
        let number = self.exports.next.fetch_add(1, Ordering::Relaxed);
        let spool = self.parts.spool.clone();
        let copied = match blocking(move || nameless(&spool, number)).await {
            Ok(file) => self.copy(file).await,
            Err(error) => Err(error),
        };
        match copied {
            Ok((file, written)) => {
                let export =
                    Export { number, file: Arc::new(file), bytes: written.bytes, used_s: self.parts.clock.now_s() };
                self.exports.open.lock().push(export);
                (200, json(&Opened { export: number, bytes: written.bytes }))
            }
            Err(error) => {
                tracing::warn!("the snapshot for another router cannot be written: {error}");
                failed(503, "the snapshot cannot be written")
            }
        }
    }

    async fn chunk(&self, number: u64, offset: u64) -> Reply {
        let found = {
            let mut open = self.exports.open.lock();
            let export = open.iter_mut().find(|export| export.number == number);
            export.map(|export| {
                export.used_s = self.parts.clock.now_s();
                (Arc::clone(&export.file), export.bytes.saturating_sub(offset).min(CHUNK_BYTES))
            })
        };
        let Some((file, length)) = found else { return failed(404, "no such export") };
        let read = blocking(move || {
            let mut chunk = vec![0; length as usize];
            file.read_exact_at(&mut chunk, offset)?;
            Ok(chunk)
        });
        match read.await {
            Ok(chunk) => (200, chunk.into()),
            Err(error) => failed(503, &error.to_string()),
        }
    }
}

/// A file that is gone when it is closed.
pub(super) fn nameless(spool: &Path, number: u64) -> io::Result<File> {
    let path = spool.join(format!("warmfront-{}-{number}.part", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn json(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value).expect("writing to memory does not fail").into()
}

fn failed(status: u16, message: &str) -> Reply {
    (status, serde_json::json!({"error": {"message": message}}).to_string().into())
}

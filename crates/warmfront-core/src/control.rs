//! The control process: started, watched, and listened to over a Unix socket.
//!
//! It discovers and probes servers in Python and sends the whole fleet each time anything changed. Frames are a length (u32,
//! big-endian) and a `MessagePack` map with a `type`; unknown types and fields are ignored, so either side may learn first.
//! One connection counts at a time, and a new one replaces it: a control process that was restarted must not wait for the
//! end of a dead one's socket. Without a control process the core keeps its last fleet.
//!
//! The child must not outlive us, even if we are killed: it ends when its standard input, a pipe only we hold, or the
//! socket ends. We cannot run code in the child (no `unsafe`), so that part is its own duty.

mod frames;
mod process;

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{JoinError, JoinSet};

use crate::error::CoreError;
use crate::fleet::FleetUpdate;
use frames::{Incoming, read_frame};
pub use process::keep_running;

/// Answers on their way to the control process.
const ANSWERS_MAX: usize = 64;
/// Questions being answered at a time; more wait in the socket.
const QUESTIONS_MAX: usize = 64;
/// A control process that takes nothing for so long is hung.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What the admin API wants to know from this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// `explain`, `fleet`, `policy`, `tokens`, …
    pub question: String,
    pub payload: Bytes,
    /// For `explain` and `tokens`: the path the request would have been sent to.
    pub path: String,
}

/// HTTP status and JSON body.
pub type Reply = (u16, Bytes);
/// Answers questions; runs on the background runtime.
pub type Answerer = dyn Fn(Question) -> Pin<Box<dyn Future<Output = Reply> + Send>> + Send + Sync;

/// The core's end of the link.
pub struct Control {
    listener: UnixListener,
    /// Removed again when the link ends.
    path: PathBuf,
    hello: Vec<u8>,
    updates: watch::Sender<FleetUpdate>,
    answerer: Arc<Answerer>,
}

impl Control {
    /// Binds the socket; a file that a dead process left there is replaced.
    ///
    /// `serving` is the address clients use, `updates` gets every fleet that arrives.
    pub fn bind(
        path: &str,
        serving: &str,
        updates: watch::Sender<FleetUpdate>,
        answerer: Arc<Answerer>,
    ) -> Result<Self, CoreError> {
        let path = PathBuf::from(path);
        let failed = |source| CoreError::Listen { address: path.display().to_string(), source };
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(&path).map_err(failed)?;
        Ok(Self { listener, path, hello: frames::hello(serving, std::process::id()), updates, answerer })
    }

    /// Serves one control process after the other. `states` carries encoded fleet states; each notice of `reloads` is
    /// passed on to the process that is connected, or to the next one.
    pub async fn run(self, states: watch::Receiver<Bytes>, reloads: Arc<Notify>) {
        let mut current = JoinSet::new();
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!("cannot accept the control process: {error}");
                    tokio::time::sleep(WRITE_TIMEOUT).await;
                    continue;
                }
            };
            current.shutdown().await;
            tracing::info!("the control process is connected");
            let link = Link { updates: self.updates.clone(), answerer: Arc::clone(&self.answerer) };
            let told = Told { states: states.clone(), reloads: Arc::clone(&reloads) };
            current.spawn(link.run(stream, self.hello.clone(), told));
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!("control socket {}: {error}", self.path.display());
        }
    }
}

/// What the control process is told without asking.
struct Told {
    states: watch::Receiver<Bytes>,
    reloads: Arc<Notify>,
}

/// How a connection ends.
enum End {
    /// This process ends.
    Stopped,
    Broken(String),
}

/// One connection.
struct Link {
    updates: watch::Sender<FleetUpdate>,
    answerer: Arc<Answerer>,
}

impl Link {
    async fn run(self, stream: UnixStream, hello: Vec<u8>, told: Told) {
        let (reader, writer) = stream.into_split();
        let (answers, outgoing) = mpsc::channel(ANSWERS_MAX);
        let end = tokio::select! {
            reason = self.read(BufReader::new(reader), answers) => End::Broken(reason),
            end = write(writer, hello, told, outgoing) => end,
        };
        match end {
            End::Stopped => tracing::debug!("the control process is told to stop"),
            End::Broken(reason) => {
                tracing::warn!(reason, "the control process is disconnected; the fleet stays as it is");
            }
        }
    }

    /// Takes frames until the connection ends; returns why.
    async fn read(&self, mut reader: BufReader<OwnedReadHalf>, answers: mpsc::Sender<Vec<u8>>) -> String {
        let mut questions = JoinSet::new();
        loop {
            while let Some(result) = questions.try_join_next() {
                note_panic(result);
            }
            if questions.len() >= QUESTIONS_MAX
                && let Some(result) = questions.join_next().await
            {
                note_panic(result);
            }
            match read_frame(&mut reader).await.and_then(|frame| frames::decode(&frame)) {
                Ok(incoming) => self.take(incoming, &answers, &mut questions),
                Err(reason) => return reason,
            }
        }
    }

    fn take(&self, incoming: Incoming, answers: &mpsc::Sender<Vec<u8>>, questions: &mut JoinSet<()>) {
        match incoming {
            Incoming::Fleet(update) => {
                self.updates.send_replace(update);
            }
            Incoming::Ask { id, question } => {
                let (answer, answers) = ((self.answerer)(question), answers.clone());
                questions.spawn(async move {
                    let (status, body) = answer.await;
                    // Nobody to tell when the connection has ended meanwhile.
                    let _ended = answers.send(frames::answer(id, status, &body)).await;
                });
            }
            Incoming::Stopping => tracing::info!("the control process is stopping"),
            Incoming::Unknown(kind) => tracing::debug!(kind, "a message of the control process is not known here"),
        }
    }
}

fn note_panic(result: Result<(), JoinError>) {
    if let Err(error) = result {
        tracing::error!("answering a question of the admin API panicked: {error}");
    }
}

/// Sends hello, states, answers and reloads, and `stop` when there will be no more states, until the connection ends; returns why.
async fn write(
    mut writer: OwnedWriteHalf,
    hello: Vec<u8>,
    Told { mut states, reloads }: Told,
    mut answers: mpsc::Receiver<Vec<u8>>,
) -> End {
    let mut frame = hello;
    let mut stopping = false;
    states.mark_changed();
    loop {
        match tokio::time::timeout(WRITE_TIMEOUT, writer.write_all(&frame)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return End::Broken(error.to_string()),
            Err(_) => return End::Broken("it takes nothing".into()),
        }
        if stopping {
            return End::Stopped;
        }
        frame = tokio::select! {
            Some(answer) = answers.recv() => answer,
            () = reloads.notified() => frames::reload(),
            changed = states.changed() => {
                stopping = changed.is_err();
                if stopping { frames::stop() } else { frames::state(&states.borrow_and_update()) }
            }
        };
    }
}

#[cfg(test)]
mod tests;

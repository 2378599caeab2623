//! The listening socket, from one process of a router to the next.
//!
//! Two processes that bind the same address with `SO_REUSEPORT` have two queues, and connections in the queue of the one
//! that closes are reset. Here both hold the very same socket, so there is one queue and nothing is lost. The next
//! process connects to a Unix socket (`front.handover`) and gets the listening socket with a byte `L`. Once it is ready
//! to serve it says `T`; the one before stops accepting, removes its Unix socket and says `S`; then the next one accepts.
//! If the next one ends before that, nothing has happened.
//!
//! A socket that systemd holds (`LISTEN_FDS`) outlives us in the same way.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::mem::MaybeUninit;
use std::net::{TcpListener, ToSocketAddrs as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use listenfd::ListenFd;
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};

/// With the socket.
const SOCKET: u8 = b'L';
/// From the next process: it is ready.
const TAKEN: u8 = b'T';
/// From the one before: it accepts no more.
const STOPPED: u8 = b'S';
/// How long the other side may take for a step that needs no thought.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// After an offer that came to nothing; without file descriptors the next would come to nothing at once.
const PAUSE: Duration = Duration::from_millis(200);

/// The socket of a process that still serves at it.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) listener: TcpListener,
    before: BlockingStream,
}

impl Claim {
    /// Asks the process at `path` for its socket; `None` when there is no such process.
    ///
    /// `listen` is the address that the configuration wants.
    pub(crate) fn make(path: &str, listen: &str) -> Result<Option<Self>> {
        let before = match BlockingStream::connect(path) {
            Ok(stream) => stream,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        before.set_read_timeout(Some(STEP_TIMEOUT))?;
        let listener = TcpListener::from(receive(before.as_fd())?);
        let address = listener.local_addr()?;
        if !listen.to_socket_addrs()?.any(|wanted| wanted == address || wanted.port() == 0) {
            return Err(Error::other(format!(
                "the process before listens at {address}, and a socket keeps its address"
            )));
        }
        before.set_nonblocking(true)?;
        Ok(Some(Self { listener, before }))
    }

    /// Says that this process is ready; returns when the one before accepts no more, or has gone.
    pub(crate) async fn take(self) -> Result<()> {
        let mut before = UnixStream::from_std(self.before)?;
        let taken = async {
            before.write_all(&[TAKEN]).await?;
            before.read_u8().await
        };
        match tokio::time::timeout(STEP_TIMEOUT, taken).await {
            Ok(Ok(STOPPED)) => Ok(()),
            Ok(Ok(other)) => Err(Error::other(format!("the process before says {other:#x}"))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ErrorKind::TimedOut.into()),
        }
    }
}

/// The first socket that systemd holds for this process.
pub(crate) fn from_systemd() -> Result<Option<TcpListener>> {
    ListenFd::from_env().take_tcp_listener(0)
}

/// Offers our socket to the next process.
#[derive(Debug)]
pub(crate) struct Offer {
    unix: UnixListener,
    /// Removed at the end, unless the process that took over has its own there by then.
    path: Option<PathBuf>,
    socket: OwnedFd,
}

impl Offer {
    /// Listens at `path`, for processes of this user only; a file that a dead process left there is replaced.
    pub(crate) fn make(path: &str, socket: OwnedFd) -> Result<Self> {
        let path = PathBuf::from(path);
        remove(&path)?;
        let unix = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { unix, path: Some(path), socket })
    }

    /// Waits for a process that takes over, and lets `stop` end accepting here before it is told to begin.
    pub(crate) async fn run(mut self, stop: impl Fn()) {
        loop {
            match self.offer(&stop).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!("a process wanted our socket and did not take over ({error}); serving goes on");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn offer(&mut self, stop: &impl Fn()) -> Result<()> {
        let (mut next, _) = self.unix.accept().await?;
        tracing::info!("another process asks for our socket");
        next.writable().await?;
        send(next.as_fd(), self.socket.as_fd())?;
        match next.read_u8().await? {
            TAKEN => {}
            other => return Err(Error::other(format!("it says {other:#x}"))),
        }
        stop();
        self.remove();
        if let Err(error) = next.write_all(&[STOPPED]).await {
            tracing::warn!("the next process has gone after it took over: {error}");
        }
        tracing::info!("another process accepts from now on");
        Ok(())
    }
}

impl Offer {
    fn remove(&mut self) {
        if let Some(path) = self.path.take()
            && let Err(error) = remove(&path)
        {
            tracing::warn!("cannot remove {}: {error}", path.display());
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.remove();
    }
}

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn send(stream: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let sockets = [socket];
    assert!(control.push(SendAncillaryMessage::ScmRights(&sockets)), "there is room for one descriptor");
    sendmsg(stream, &[IoSlice::new(&[SOCKET])], &mut control, SendFlags::empty())?;
    Ok(())
}

fn receive(stream: BorrowedFd<'_>) -> Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let sockets = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(sockets) => Some(sockets),
        _ => None,
    });
    match sockets.flatten().next() {
        Some(socket) if byte == [SOCKET] => Ok(socket),
        _ => Err(Error::other("the process there does not hand over a socket")),
    }
}

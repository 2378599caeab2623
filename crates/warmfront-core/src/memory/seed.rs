//! Asking another router for its snapshot.

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::uri::Scheme;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::export::nameless;
use super::format::Archive;
use super::keep::blocking;
use super::{Memory, Recalled};
use crate::backoff::seconds;
use crate::fleet::TlsOptions;
use crate::http::read_secret;
use crate::http::tls::{ClientTls, host_of};

/// More than any index is worth carrying over a network.
const BYTES_MAX: u64 = 8 << 30;
const PATH: &str = "/admin/snapshot";

impl Memory {
    /// The snapshot of a peer; `None` when it gives none in time. Says why.
    pub(super) async fn seed(&self, peer: &str) -> Option<Recalled> {
        let wait = seconds(self.config.seed_timeout_s);
        let fetched = timeout(wait, self.fetch(peer)).await.unwrap_or_else(|_| Err(late(wait)));
        match fetched {
            Ok(file) => {
                let opened = tokio::task::spawn_blocking(move || Archive::open(file)).await;
                let result = opened.unwrap_or_else(|error| Err(io::Error::other(error).into()));
                self.accept(peer, result)
            }
            Err(error) => {
                tracing::warn!(peer, "no snapshot from the other router: {error}");
                self.refuse("peer", &format!("{peer}: {error}"));
                None
            }
        }
    }

    async fn fetch(&self, peer: &str) -> io::Result<File> {
        let uri: Uri = peer.parse().map_err(io::Error::other)?;
        let authority = uri.authority().ok_or_else(|| io::Error::other("an address without a host"))?.as_str();
        let stream = TcpStream::connect(authority).await?;
        if uri.scheme() != Some(&Scheme::HTTPS) {
            return self.ask(stream, authority).await;
        }
        let config = self.config.clone();
        let options = TlsOptions { ca: config.seed_ca, cert: config.seed_client_cert, key: config.seed_client_key };
        let stream = Arc::<ClientTls>::default().connect(&options, host_of(authority), stream).await?;
        self.ask(stream, authority).await
    }

    async fn ask<S>(&self, stream: S, authority: &str) -> io::Result<File>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let mut request = Request::get(PATH).header("host", authority);
        for (name, value) in &self.config.seed_headers {
            request = request.header(name, value);
        }
        for (name, path) in &self.config.seed_headers_from_file {
            let path = path.clone();
            let secret = blocking(move || read_secret(&path).map_err(io::Error::other)).await?;
            request = request.header(name, secret);
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(io::Error::other)?;
        let receive = async {
            let answer = sender.send_request(request).await.map_err(io::Error::other)?;
            if answer.status() != StatusCode::OK {
                return Err(io::Error::other(format!("it answers {}", answer.status())));
            }
            self.receive(answer.into_body()).await
        };
        tokio::pin!(connection);
        tokio::select! {
            received = receive => received,
            closed = &mut connection => Err(closed.err().map_or_else(
                || io::Error::from(io::ErrorKind::UnexpectedEof),
                io::Error::other,
            )),
        }
    }

    /// Writes the answer to a file chunk by chunk; only one is in memory.
    async fn receive(&self, mut body: hyper::body::Incoming) -> io::Result<File> {
        let spool = self.parts.spool.clone();
        let mut file = blocking(move || nameless(&spool, u64::MAX)).await?;
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            let Ok(chunk) = frame.map_err(io::Error::other)?.into_data() else { continue };
            bytes += chunk.len() as u64;
            if bytes > BYTES_MAX {
                return Err(io::Error::other("its snapshot is too long"));
            }
            file = blocking(move || file.write_all(&chunk).map(|()| file)).await?;
        }
        blocking(move || io::Seek::rewind(&mut file).map(|()| file)).await
    }
}

fn late(wait: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("not within {} s", wait.as_secs_f64()))
}

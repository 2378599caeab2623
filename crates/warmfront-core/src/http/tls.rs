//! TLS on both sides, by rustls with ring.
//!
//! Certificates are files that are read again when they change; a bad one leaves the one before in charge, and streams
//! that run keep the session they began with. There is no switch that turns verification off: an engine's certificate is
//! checked against the system's authorities or the `ca` of its server, which also holds a self-signed certificate.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream as EngineStream;
use tokio_rustls::server::TlsStream as ClientStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::watched::Watched;
use crate::config::TlsConfig;
use crate::error::CoreError;
use crate::fleet::TlsOptions;

/// The only protocol spoken inside.
const ALPN: &[u8] = b"http/1.1";

/// Takes TLS connections of clients.
#[derive(Debug)]
pub(crate) struct ServerTls(Watched<ServerConfig>);

impl ServerTls {
    pub(crate) fn new(config: &TlsConfig) -> Result<Self, CoreError> {
        let paths = [Some(&config.cert), Some(&config.key), config.client_ca.as_ref()];
        let paths = paths.into_iter().flatten().map(PathBuf::from).collect();
        let config = config.clone();
        Watched::open("front.tls", paths, move || server_config(&config)).map(Self)
    }

    /// Reads the files again if they have changed. Blocks on the file system.
    pub(crate) fn refresh(&self) {
        self.0.refresh();
    }

    pub(crate) async fn accept(&self, socket: TcpStream) -> io::Result<ClientStream<TcpStream>> {
        TlsAcceptor::from(self.0.current()).accept(socket).await
    }
}

/// Configurations towards engines, one for each set of files.
#[derive(Debug, Default)]
pub(crate) struct ClientTls(Mutex<HashMap<TlsOptions, Arc<Watched<ClientConfig>>>>);

impl ClientTls {
    /// Speaks TLS on a socket to `host`.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or the two ends do not agree, mostly on the engine's certificate.
    pub(crate) async fn connect<S>(
        self: &Arc<Self>,
        options: &TlsOptions,
        host: &str,
        socket: S,
    ) -> io::Result<EngineStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let (this, options) = (Arc::clone(self), options.clone());
        let config = tokio::task::spawn_blocking(move || this.config(&options)).await.map_err(io::Error::other)?;
        TlsConnector::from(config.map_err(io::Error::other)?).connect(name, socket).await
    }

    /// The configuration of these files as they are now. Blocks on the file system.
    fn config(&self, options: &TlsOptions) -> Result<Arc<ClientConfig>, CoreError> {
        if let Some(known) = self.0.lock().get(options).cloned() {
            known.refresh();
            return Ok(known.current());
        }
        let paths = [&options.ca, &options.cert, &options.key].into_iter().flatten().map(PathBuf::from).collect();
        let load = options.clone();
        let fresh = Arc::new(Watched::open("fleet.servers: TLS", paths, move || client_config(&load))?);
        let current = fresh.current();
        self.0.lock().insert(options.clone(), fresh);
        Ok(current)
    }
}

/// Host of `host:port`, without the brackets of IPv6.
pub(crate) fn host_of(authority: &str) -> &str {
    authority.rsplit_once(':').map_or(authority, |(host, _)| host).trim_matches(['[', ']'])
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    Arc::clone(PROVIDER.get_or_init(|| Arc::new(ring::default_provider())))
}

fn server_config(config: &TlsConfig) -> Result<ServerConfig, CoreError> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| CoreError::Config(format!("TLS: {error}")))?;
    let builder = match &config.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(roots(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| unreadable(path, &error))?)
        }
    };
    let mut made = builder
        .with_single_cert(certificates(&config.cert)?, private_key(&config.key)?)
        .map_err(|error| unreadable(&config.cert, &format!("it does not fit {}: {error}", config.key)))?;
    made.alpn_protocols = vec![ALPN.to_vec()];
    Ok(made)
}

fn client_config(options: &TlsOptions) -> Result<ClientConfig, CoreError> {
    let roots = match &options.ca {
        Some(path) => roots(path)?,
        None => system_roots()?,
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| CoreError::Config(format!("TLS: {error}")))?
        .with_root_certificates(roots);
    let mut made = match (&options.cert, &options.key) {
        (Some(cert), Some(key)) => builder
            .with_client_auth_cert(certificates(cert)?, private_key(key)?)
            .map_err(|error| unreadable(cert, &format!("it does not fit {key}: {error}")))?,
        _ => builder.with_no_client_auth(),
    };
    made.alpn_protocols = vec![ALPN.to_vec()];
    Ok(made)
}

fn system_roots() -> Result<RootCertStore, CoreError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (added, _unusable) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        return Err(CoreError::Config("TLS: this system has no certificate authorities; name a `ca`".to_owned()));
    }
    Ok(roots)
}

fn roots(path: &str) -> Result<RootCertStore, CoreError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| unreadable(path, &error))?;
    }
    Ok(roots)
}

fn certificates(path: &str) -> Result<Vec<CertificateDer<'static>>, CoreError> {
    let read: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(path).map_err(|error| unreadable(path, &error))?.collect();
    let certificates = read.map_err(|error| unreadable(path, &error))?;
    if certificates.is_empty() { Err(unreadable(path, "no certificate in it")) } else { Ok(certificates) }
}

fn private_key(path: &str) -> Result<PrivateKeyDer<'static>, CoreError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &str, reason: &(impl std::fmt::Display + ?Sized)) -> CoreError {
    CoreError::File { path: path.to_owned(), reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_an_authority_has_neither_port_nor_brackets() {
        assert_eq!(host_of("engine:8000"), "engine");
        assert_eq!(host_of("10.0.0.1:443"), "10.0.0.1");
        assert_eq!(host_of("[2001:db8::1]:443"), "2001:db8::1");
    }
}

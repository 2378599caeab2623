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

/// Configurations towards engines, one for each set of files; as read last.
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
        let config = if let Some(config) = self.known(options) {
            config
        } else {
            let (this, options) = (Arc::clone(self), options.clone());
            let read = tokio::task::spawn_blocking(move || this.read(&options)).await.map_err(io::Error::other)?;
            read.map_err(io::Error::other)?
        };
        TlsConnector::from(config).connect(name, socket).await
    }

    /// Whether anything was read from files that may change.
    pub(crate) fn has_files(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// Reads the files again that have changed. Blocks on the file system.
    pub(crate) fn refresh(&self) {
        let all: Vec<_> = self.0.lock().values().cloned().collect();
        for watched in all {
            watched.refresh();
        }
    }

    fn known(&self, options: &TlsOptions) -> Option<Arc<ClientConfig>> {
        self.0.lock().get(options).map(|watched| watched.current())
    }

    /// Reads files for the first time. Blocks on the file system.
    fn read(&self, options: &TlsOptions) -> Result<Arc<ClientConfig>, CoreError> {
        let paths = [&options.ca, &options.cert, &options.key].into_iter().flatten().map(PathBuf::from).collect();
        let load = options.clone();
        let fresh = Arc::new(Watched::open("TLS towards servers", paths, move || client_config(&load))?);
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

    /// Of nobody: its key was thrown away.
    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\n\
MIIBdjCCARugAwIBAgIUR6R2d7o53mKA7Zz+2KfEqLj/oT8wCgYIKoZIzj0EAwIw\n\
DzENMAsGA1UEAwwEdGVzdDAgFw0yNjExMzAxODQzNDhaGA8yMTI2MTEwNjE4NDM0\n\
OFowDzENMAsGA1UEAwwEdGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABDa6\n\
RluSl4ulY28CeuK44Yw2EPZKvDGEuGSlKWYE9Khz32KSlt/GJyCnW6V31Bd+vdMv\n\
KTneyfdQx6GZc0/QhZ2jUzBRMB0GA1UdDgQWBBRG3VuvFE1EyqmxDnim/p9bo+R8\n\
ZjAfBgNVHSMEGDAWgBRG3VuvFE1EyqmxDnim/p9bo+R8ZjAPBgNVHRMBAf8EBTAD\n\
AQH/MAoGCCqGSM49BAMCA0kAMEYCIQCq1AmjXdteKj3yInzikKodyGCI+HoBzOSE\n\
B49b3bw9zwIhALYXW/kSLRqeyU/TamNelIC7uJPgAxEojiy26TTssFHi\n\
-----END CERTIFICATE-----\n";

    #[test]
    fn files_towards_engines_are_read_once_and_again_when_they_change() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), CERTIFICATE).unwrap();
        let options = TlsOptions { ca: Some(file.path().to_str().unwrap().to_owned()), ..TlsOptions::default() };
        let tls = ClientTls::default();
        assert!(tls.known(&options).is_none() && !tls.has_files());
        let first = tls.read(&options).unwrap();
        let is_first = || Arc::ptr_eq(&first, &tls.known(&options).unwrap());
        std::fs::write(file.path(), CERTIFICATE.repeat(2)).unwrap();
        assert!(is_first() && tls.has_files(), "a connection looks at no file");
        tls.refresh();
        assert!(!is_first());
    }

    #[test]
    fn the_host_of_an_authority_has_neither_port_nor_brackets() {
        assert_eq!(host_of("engine:8000"), "engine");
        assert_eq!(host_of("10.0.0.1:443"), "10.0.0.1");
        assert_eq!(host_of("[2001:db8::1]:443"), "2001:db8::1");
    }
}

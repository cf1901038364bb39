//! The certificate of the gateway. A reload reads it again; open connections keep the former one.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::GatewayTls;

/// Why the certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use {path} (`gateway.tls`)")]
pub(crate) struct TlsError {
    path: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

pub(super) fn load(files: &GatewayTls) -> Result<Arc<ServerConfig>, TlsError> {
    let failed = |path: &Path, source| TlsError { path: path.display().to_string(), source };
    let read = |path: &Path| std::fs::read(path).map_err(|error| failed(path, error.into()));
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(&files.cert)?).collect();
    let certificates = certificates.map_err(|error| failed(&files.cert, error.to_string().into()))?;
    if certificates.is_empty() {
        return Err(failed(&files.cert, "the file contains no certificate".into()));
    }
    // The text of the error does not quote the file.
    let key = PrivateKeyDer::from_pem_slice(&read(&files.key)?)
        .map_err(|_| failed(&files.key, "the file contains no private key in PEM form".into()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&files.cert, error.into()))?
        .with_no_client_auth()
        .with_single_cert(certificates, key);
    let mut config = config.map_err(|error| failed(&files.cert, error.into()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

//! A registry of images for those who pull: the little of its protocol that containerd speaks.
//!
//! CRI restores a container only if it can pull the image that the container was started from.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fs, io, thread};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::command;

const LIMIT: Duration = Duration::from_secs(60);

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A registry on this machine. It ends when this is dropped.
#[derive(Debug)]
pub struct Registry {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    ended: AtomicBool,
    content: Mutex<Content>,
}

#[derive(Debug, Default)]
struct Content {
    /// Layers and configurations by digest.
    blobs: HashMap<String, Blob>,
    /// By repository and then digest or tag.
    manifests: HashMap<String, Vec<u8>>,
}

#[derive(Debug, Clone)]
enum Blob {
    File(PathBuf),
    Bytes(Vec<u8>),
}

impl Registry {
    /// Starts an empty one.
    pub fn start() -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let shared = Arc::<Shared>::default();
        let server = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming() {
                if server.ended.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(stream), server) = (stream, Arc::clone(&server)) else { continue };
                // A client that goes away is not missed.
                thread::spawn(move || drop(serve(&stream, &server)));
            }
        });
        Ok(Self { port, shared })
    }

    /// The one of all tests, with the tests' image as [`Registry::image`]; `parts` is what
    /// [`crate::image::build`] made the image of.
    pub fn of_all_tests(parts: &Path) -> Result<Arc<Self>> {
        static ONE: Mutex<Option<Arc<Registry>>> = Mutex::new(None);
        let mut one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(registry) = &*one {
            return Ok(Arc::clone(registry));
        }
        let registry = Arc::new(Self::start()?);
        registry.push_tests_image(parts)?;
        *one = Some(Arc::clone(&registry));
        Ok(registry)
    }

    /// Adds the tests' image, and one of the same files that does what a pod's sandbox does.
    pub fn push_tests_image(&self, parts: &Path) -> Result<()> {
        let mut config: Value = serde_json::from_slice(&fs::read(parts.join("config.json"))?)?;
        let layer = parts.join("layer.tar");
        self.push("stasis-test:1", &config, &layer, &[])?;
        config["config"]["Cmd"] = json!(["/bin/sleep", "1000000"]);
        self.push("stasis-pause:1", &config, &layer, &[]).map(drop)
    }

    /// The name of the tests' image here.
    #[must_use]
    pub fn image(&self) -> String {
        format!("{}/stasis-test:1", self.host())
    }

    /// The name of the sandboxes' image here.
    #[must_use]
    pub fn pause(&self) -> String {
        format!("{}/stasis-pause:1", self.host())
    }

    /// Its host and port.
    #[must_use]
    pub fn host(&self) -> String {
        // By this name containerd's client takes it for one that speaks HTTP.
        format!("localhost:{}", self.port)
    }

    /// Adds an image of one layer, an archive; gives its name. Of the configuration only what
    /// does not depend on the layer.
    pub fn push(
        &self,
        name: &str,
        config: &Value,
        layer: &Path,
        annotations: &[(&str, &str)],
    ) -> Result<String> {
        let (layer_digest, size) = (digest(layer)?, fs::metadata(layer)?.len());
        let mut config = config.clone();
        config["rootfs"] = json!({ "type": "layers", "diff_ids": [layer_digest] });
        let config = config.to_string().into_bytes();
        let config_digest = digest_of(&config)?;
        let annotations: Map<String, Value> =
            annotations.iter().map(|&(name, value)| (name.to_owned(), value.into())).collect();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": config_digest,
                "size": config.len(),
            },
            "layers": [{
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": layer_digest,
                "size": size,
            }],
            "annotations": annotations,
        });
        let manifest = manifest.to_string().into_bytes();
        let (repository, tag) = name.split_once(':').context("a name without a tag")?;
        let mut content = self.shared.content();
        content.blobs.insert(layer_digest, Blob::File(layer.to_owned()));
        content.blobs.insert(config_digest, Blob::Bytes(config));
        for reference in [digest_of(&manifest)?, tag.to_owned()] {
            content.manifests.insert(format!("{repository}/{reference}"), manifest.clone());
        }
        Ok(format!("{}/{name}", self.host()))
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        // Wakes the one who accepts.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

impl Shared {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is at a path below `/v2/`, and its type.
    fn find(&self, path: &str) -> Option<(Blob, &'static str)> {
        let content = self.content();
        if let Some((repository, reference)) = path.split_once("/manifests/") {
            let manifest = content.manifests.get(&format!("{repository}/{reference}"))?;
            return Some((Blob::Bytes(manifest.clone()), MANIFEST));
        }
        let (_, digest) = path.split_once("/blobs/")?;
        Some((content.blobs.get(digest)?.clone(), "application/octet-stream"))
    }
}

/// Answers the requests of a connection.
fn serve(stream: &TcpStream, shared: &Shared) -> io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    while let Some(request) = lines.next().transpose()? {
        // No request that containerd makes here has a body.
        for header in lines.by_ref() {
            if header?.is_empty() {
                break;
            }
        }
        if shared.ended.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut words = request.split(' ');
        let (method, target) = (words.next(), words.next().unwrap_or_default());
        let path = target.split('?').next().unwrap_or_default();
        let found = path.strip_prefix("/v2/").and_then(|path| shared.find(path));
        let mut to = stream;
        let Some((blob, kind)) = found else {
            write!(to, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        };
        let length = match &blob {
            Blob::File(path) => fs::metadata(path)?.len(),
            Blob::Bytes(bytes) => bytes.len() as u64,
        };
        write!(to, "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n")?;
        match blob {
            _ if method != Some("GET") => {}
            Blob::File(path) => {
                io::copy(&mut fs::File::open(path)?, &mut to)?;
            }
            Blob::Bytes(bytes) => to.write_all(&bytes)?,
        }
    }
    Ok(())
}

/// The digest of a file.
fn digest(path: &Path) -> Result<String> {
    let sum = command::succeed(Command::new("sha256sum").arg(path), LIMIT)?;
    let sum = sum.split_whitespace().next().context("sha256sum printed nothing")?;
    Ok(format!("sha256:{sum}"))
}

fn digest_of(bytes: &[u8]) -> Result<String> {
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(bytes)?;
    digest(file.path())
}

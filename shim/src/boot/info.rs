//! `-info`: what runtime this is and what it can do. containerd asks once for each runtime, and
//! for containers with id-mapped mounts.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{self, Message as _};
use containerd_shim::protos::types::introspection::{RuntimeInfo, RuntimeVersion};

use super::protocol::{RequestError, options_alone};
use super::{REVISION, RUNTIME_NAME, VERSION};
use crate::options::{Options, OptionsError};

/// The type of what `runc features` prints, as JSON, to containerd's typeurl.
const FEATURES_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";

/// Why nothing can be said.
#[derive(Debug, thiserror::Error)]
pub enum InfoError {
    /// Standard input.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The options.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The runtime is not there.
    #[error("the runtime {} is not there or cannot be executed", .0.display())]
    NoRuntime(PathBuf),
    /// The answer.
    #[error("cannot encode the answer")]
    Encode(#[from] protobuf::Error),
}

/// The answer to `-info` with this on standard input.
pub fn info(input: &[u8]) -> Result<Vec<u8>, InfoError> {
    let any = options_alone(input)?;
    let options = Options::decode(any.as_ref())?;
    let program =
        find(&options.program).ok_or_else(|| InfoError::NoRuntime(options.program.clone()))?;
    let features = features(&program).unwrap_or_else(|error| {
        // There are runtimes without the subcommand. Standard error is for warnings only then.
        tracing::debug!(%error, program = %program.display(), "no features");
        None
    });
    let info = RuntimeInfo {
        name: RUNTIME_NAME.to_owned(),
        version: Some(RuntimeVersion {
            version: VERSION.to_owned(),
            revision: REVISION.unwrap_or_default().to_owned(),
            ..RuntimeVersion::default()
        })
        .into(),
        options: any.into(),
        features: features.into(),
        ..RuntimeInfo::default()
    };
    Ok(info.write_to_bytes()?)
}

fn features(program: &Path) -> io::Result<Option<Any>> {
    let output = Command::new(program).arg("features").output()?;
    // Not decoded, so that nothing of a newer runtime is lost; but nothing else is passed on.
    let object = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>;
    if !output.status.success() || object(&output.stdout).is_err() {
        return Ok(None);
    }
    Ok(Some(Any { type_url: FEATURES_TYPE.to_owned(), value: output.stdout, ..Any::default() }))
}

/// Looks for an executable.
fn find(program: &Path) -> Option<PathBuf> {
    let executable = |path: &PathBuf| {
        fs::metadata(path)
            .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    if program.is_absolute() {
        return Some(program.to_owned()).filter(executable);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(executable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use containerd_shim::api::Options as RuncOptions;

    fn options(program: &Path) -> Any {
        let options = RuncOptions {
            binary_name: program.to_str().unwrap().to_owned(),
            ..RuncOptions::default()
        };
        Any {
            type_url: "containerd.runc.v1.Options".into(),
            value: options.write_to_bytes().unwrap(),
            ..Any::default()
        }
    }

    fn runtime(script: &str) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("runtime");
        crate::testing::script(&path, &format!("#!/bin/sh\n{script}\n"));
        (directory, path)
    }

    fn ask(options: &Any) -> RuntimeInfo {
        let answer = info(&options.write_to_bytes().unwrap()).unwrap();
        RuntimeInfo::parse_from_bytes(&answer).unwrap()
    }

    #[test]
    fn the_runtimes_features_are_passed_on() {
        let (_directory, path) = runtime("[ \"$*\" = features ] && echo '{\"new\":1}'");
        let options = options(&path);
        let info = ask(&options);
        assert_eq!(info.name, "io.containerd.runc.stasis");
        assert_eq!(info.version.version, VERSION);
        assert_eq!(info.options.as_ref(), Some(&options));
        assert_eq!(info.features.type_url, FEATURES_TYPE);
        assert_eq!(info.features.value, b"{\"new\":1}\n");
    }

    #[test]
    fn a_runtime_without_features_has_none() {
        for script in ["exit 1", "echo text", "echo '[1]'", "echo '{}'; exit 1"] {
            let (_directory, path) = runtime(script);
            assert!(ask(&options(&path)).features.is_none(), "{script}");
        }
    }

    #[test]
    fn a_runtime_that_is_missing_is_an_error() {
        for missing in ["/none/such", "no-such-runtime", "/etc"] {
            let error = info(&options(Path::new(missing)).write_to_bytes().unwrap()).unwrap_err();
            assert!(error.to_string().contains(missing), "{error}");
        }
        assert!(info(b"\xff").is_err());
    }
}

//! `start`: containerd wants a server for a container.
//!
//! If the container's group has one, its address is the answer. Else a server is started: this
//! executable again, in the bundle, with the listening socket as standard input.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::{CommandExt as _, parent_id};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::thread::{CoreSchedulingScope, create_core_scheduling_cookie};

use super::Arguments;
use super::address::{Address, DIRECTORY, TooLong, gos_path, group};
use super::placement::{before_parent, join_cgroup};
use super::protocol::{Request, RequestError};
use super::socket::{Claimed, claim};
use crate::options::record::replace;
use crate::options::spec::{Spec, SpecError};
use crate::options::{Options, OptionsError};

/// The variable through which the server learns where events go.
const TTRPC_ADDRESS: &str = "TTRPC_ADDRESS";

/// The variable with which containerd asks for core scheduling.
const SCHED_CORE: &str = "SCHED_CORE";

/// The file in the bundle from which containerd 1.x learns after a restart where the server is.
const ADDRESS_FILE: &str = "address";

/// How a server is started.
#[derive(Debug, Clone)]
pub struct Serve {
    /// The bundle: where config.json is, and where the server runs.
    pub bundle: PathBuf,
    /// The executable.
    pub program: PathBuf,
    /// What comes before containerd's flags.
    pub arguments: Vec<OsString>,
    /// Where sockets are made, where the request does not say.
    pub socket_directory: PathBuf,
    /// containerd's ttrpc socket, where the request does not say.
    pub ttrpc_address: String,
    /// Whether the server and its containers may share a core only with each other.
    pub core_scheduling: bool,
}

impl Serve {
    /// This executable, as containerd has started it.
    pub fn this() -> io::Result<Self> {
        let variable = |name| std::env::var(name).unwrap_or_default();
        Ok(Self {
            bundle: std::env::current_dir()?,
            program: own_executable(),
            arguments: Vec::new(),
            socket_directory: DIRECTORY.into(),
            ttrpc_address: variable(TTRPC_ADDRESS),
            core_scheduling: !variable(SCHED_CORE).is_empty(),
        })
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Standard input.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The container's options.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The container's config.json.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Nobody would hear that a container has ended.
    #[error("containerd does not say where events go ({TTRPC_ADDRESS} is not set)")]
    NoEvents,
    /// The socket cannot be where it should.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// The socket cannot be made.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The server cannot be executed.
    #[error("cannot start {}", program.display())]
    Spawn {
        /// What.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The server cannot be put into its cgroup.
    #[error("cannot put the shim into the cgroup {}", cgroup.display())]
    Cgroup {
        /// Which.
        cgroup: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The server cannot be made to go before containerd.
    #[error("cannot set the shim's oom_score_adj")]
    OomScore(#[source] io::Error),
    /// The server cannot be told apart on its cores.
    #[error("cannot turn on core scheduling")]
    CoreScheduling(#[source] io::Error),
    /// containerd cannot be told.
    #[error("cannot write the answer")]
    Answer(#[source] io::Error),
    /// A file in the bundle.
    #[error("cannot write {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Finds or starts the server of a container and writes the answer. When it fails, neither server
/// nor socket is left.
pub fn start(
    arguments: &Arguments,
    serve: &Serve,
    input: &[u8],
    answer: &mut impl Write,
) -> Result<(), StartError> {
    let request = Request::parse(input, &arguments.namespace, &arguments.id)?;
    let options = Options::decode(request.options.as_ref())?;
    let ttrpc_address = match request.ttrpc_address.as_str() {
        "" => serve.ttrpc_address.as_str(),
        given => given,
    };
    if ttrpc_address.is_empty() {
        return Err(StartError::NoEvents);
    }
    let spec = Spec::read(&serve.bundle)?;
    let group = group(&spec, &arguments.id);
    let directory = request.socket_directory.as_deref().unwrap_or(&serve.socket_directory);
    let address = Address::new(directory, &arguments.address, &arguments.namespace, group)?;

    let path = address.path();
    let claimed =
        claim(path).map_err(|source| StartError::Listen { path: path.to_owned(), source })?;
    note_address(&serve.bundle, &address)?;
    let mut give = || {
        let answer_is = request.form.answer(&address.to_string());
        answer.write_all(&answer_is).and_then(|()| answer.flush()).map_err(StartError::Answer)
    };
    let mut listening = match claimed {
        Claimed::Taken => return give(),
        Claimed::Ours(listening) => listening,
    };
    if let Some(name) = gos_path(directory, &arguments.address, &arguments.namespace, &spec) {
        listening.add_name(&name).map_err(|source| StartError::Listen { path: name, source })?;
    }

    let socket = listening
        .descriptor()
        .map_err(|source| StartError::Listen { path: path.to_owned(), source })?;
    if serve.core_scheduling {
        // The server inherits it, as do its containers.
        create_core_scheduling_cookie(rustix::process::getpid(), CoreSchedulingScope::ProcessGroup)
            .map_err(|error| StartError::CoreScheduling(error.into()))?;
    }
    let mut command = command(arguments, serve, arguments.debug || request.debug);
    command.env(TTRPC_ADDRESS, ttrpc_address).stdin(socket);
    let server = command.spawn().map(Server::new);
    let server =
        server.map_err(|source| StartError::Spawn { program: serve.program.clone(), source })?;
    if let Some(cgroup) = options.shim_cgroup {
        join_cgroup(Path::new("/sys/fs/cgroup"), &cgroup, server.id())
            .map_err(|source| StartError::Cgroup { cgroup, source })?;
    }
    before_parent(Path::new("/proc"), parent_id(), server.id()).map_err(StartError::OomScore)?;
    give()?;
    server.leave();
    listening.keep();
    Ok(())
}

/// The server's command line. Nothing of ours goes with it: containerd reads our output until
/// nobody has it any more.
fn command(arguments: &Arguments, serve: &Serve, debug: bool) -> Command {
    let mut command = Command::new(&serve.program);
    command
        .args(&serve.arguments)
        .args(["-namespace", &arguments.namespace, "-id", &arguments.id])
        .args(["-address", &arguments.address])
        .args(debug.then_some("-debug"))
        .current_dir(&serve.bundle)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // Signals for containerd's group are not for containers.
        .process_group(0);
    command
}

fn note_address(bundle: &Path, address: &Address) -> Result<(), StartError> {
    let path = bundle.join(ADDRESS_FILE);
    replace(&path, address.to_string().as_bytes(), 0o644)
        .map_err(|source| StartError::File { path, source })
}

/// What `start` has noted in a bundle.
pub(super) fn noted_address(bundle: &Path) -> Option<String> {
    fs::read_to_string(bundle.join(ADDRESS_FILE)).ok()
}

/// A server that was started. Dropping it kills it.
struct Server(Option<Child>);

impl Server {
    fn new(child: Child) -> Self {
        Self(Some(child))
    }

    fn id(&self) -> u32 {
        self.0.as_ref().map_or(0, Child::id)
    }

    /// It outlives us.
    fn leave(mut self) {
        self.0 = None;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // Fails if it has ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// This executable by its path, under which people look for shims in a list of processes; or, if an
/// upgrade has just put another there, by its descriptor, so that `start` and server are of the
/// same version.
fn own_executable() -> PathBuf {
    let by_descriptor = Path::new("/proc/self/exe");
    let same = |path: &Path| {
        let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino()));
        matches!((identity(path), identity(by_descriptor)), (Ok(a), Ok(b)) if a == b)
    };
    std::env::current_exe()
        .ok()
        .filter(|path| path.as_os_str() != OsStr::new("") && same(path))
        .unwrap_or_else(|| by_descriptor.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::Action;
    use containerd_shim::api::Options as RuncOptions;
    use containerd_shim::protos::bootstrap_api::{BootstrapParams, BootstrapResult, Extension};
    use containerd_shim::protos::protobuf::Message as _;
    use containerd_shim::protos::protobuf::well_known_types::any::Any;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    /// Stands for a server: tells what it was given, accepts nothing, and lives while it may.
    const SERVER: &str = r#"
        exec 3>&1; { echo "$@"; echo "$TTRPC_ADDRESS"; pwd; stat -Lc %F /proc/self/fd/0 /proc/self/fd/3 \
          /proc/self/fd/2; cut -d' ' -f5 /proc/$$/stat; cat /proc/self/oom_score_adj; echo $$
        } > server.tmp; mv server.tmp server; exec sleep 1000"#;

    struct Lab {
        directory: tempfile::TempDir,
    }

    impl Lab {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let lab = Self { directory };
            lab.bundle("c1", "{}");
            lab
        }

        fn bundle(&self, id: &str, spec: &str) -> PathBuf {
            let bundle = self.directory.path().join(id);
            let _ = fs::create_dir(&bundle);
            fs::write(bundle.join("config.json"), spec).unwrap();
            bundle
        }

        fn serve(&self, id: &str) -> Serve {
            Serve {
                bundle: self.directory.path().join(id),
                program: "/bin/sh".into(),
                arguments: vec!["-c".into(), SERVER.into(), "shim".into()],
                socket_directory: self.directory.path().into(),
                ttrpc_address: "/t".into(),
                core_scheduling: false,
            }
        }

        fn start(&self, id: &str, params: &BootstrapParams) -> Result<String, StartError> {
            let mut answer = Vec::new();
            let input = params.write_to_bytes().unwrap();
            start(&arguments(id), &self.serve(id), &input, &mut answer)?;
            let result = BootstrapResult::parse_from_bytes(&answer).unwrap();
            assert_eq!((result.version, result.protocol.as_str()), (2, "ttrpc"));
            Ok(result.address)
        }

        /// What the server said; and ends it.
        fn server(&self, id: &str) -> Vec<String> {
            let path = self.directory.path().join(id).join("server");
            let begun = Instant::now();
            while !path.exists() {
                assert!(begun.elapsed() < Duration::from_secs(30), "no server");
                std::thread::sleep(Duration::from_millis(5));
            }
            let said: Vec<String> =
                fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect();
            let pid = nix::unistd::Pid::from_raw(said.last().unwrap().parse().unwrap());
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
            nix::sys::wait::waitpid(pid, None).unwrap();
            said
        }

        fn sockets(&self) -> usize {
            fs::read_dir(self.directory.path()).unwrap().count() - self.bundles()
        }

        fn bundles(&self) -> usize {
            let entries = fs::read_dir(self.directory.path()).unwrap();
            entries.filter(|entry| entry.as_ref().unwrap().path().is_dir()).count()
        }
    }

    /// As containerd 2.3 asks.
    fn params(id: &str) -> BootstrapParams {
        BootstrapParams {
            instance_id: id.into(),
            namespace: "n".into(),
            containerd_ttrpc_address: "/t2".into(),
            ..BootstrapParams::default()
        }
    }

    fn arguments(id: &str) -> Arguments {
        Arguments {
            action: Action::Start,
            namespace: "n".into(),
            id: id.into(),
            address: "/c.sock".into(),
            socket: None,
            bundle: None,
            debug: true,
        }
    }

    #[test]
    fn a_server_has_the_socket_the_bundle_and_nothing_of_ours() {
        let lab = Lab::new();
        let sockets = lab.directory.path().join("s").to_str().unwrap().to_owned();
        let asked = BootstrapParams { socket_dir: Some(sockets.clone()), ..params("c1") };
        let address = lab.start("c1", &asked).unwrap();
        assert!(address.starts_with(&format!("unix://{sockets}/")), "{address}");
        let bundle = lab.directory.path().join("c1");
        assert_eq!(fs::read_to_string(bundle.join("address")).unwrap(), address);
        UnixStream::connect(address.strip_prefix("unix://").unwrap()).unwrap();
        let said = lab.server("c1");
        assert_eq!(said[0], "-namespace n -id c1 -address /c.sock -debug");
        assert_eq!(said[1], "/t2");
        assert_eq!(fs::canonicalize(&said[2]).unwrap(), fs::canonicalize(bundle).unwrap());
        assert_eq!(said[3..6], ["socket", "character special file", "character special file"]);
        // The leader of its group.
        assert_eq!(said[6], said[8]);
        let parents = fs::read_to_string(format!("/proc/{}/oom_score_adj", parent_id())).unwrap();
        let want = (parents.trim().parse::<i32>().unwrap() + 1).min(1000);
        assert_eq!(said[7], want.to_string());
    }

    #[test]
    fn a_group_has_one_server_and_a_lost_one_is_replaced() {
        let lab = Lab::new();
        let pod = r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"pod"}}"#;
        for id in ["pod", "c2", "c3"] {
            lab.bundle(id, pod);
        }
        let first = lab.start("pod", &params("pod")).unwrap();
        let second = lab.start("c2", &params("c2")).unwrap();
        assert_eq!(first, second);
        // containerd's own shim finds it, too.
        let gos = containerd_shim::socket_address("/c.sock", "n", "pod");
        let gos = lab.directory.path().join(gos.rsplit('/').next().unwrap());
        UnixStream::connect(gos).unwrap();
        assert_eq!(noted_address(&lab.directory.path().join("c2")), Some(first.clone()));
        lab.server("pod");
        assert!(!lab.directory.path().join("c2/server").exists());
        assert_eq!(lab.start("c3", &params("c3")).unwrap(), first);
        lab.server("c3");
    }

    #[test]
    fn starts_of_one_group_at_the_same_moment_share_a_server() {
        let lab = Lab::new();
        let pod = r#"{"annotations":{"io.containerd.runc.v2.group":"g"}}"#;
        let ids: Vec<String> = (0..8).map(|number| format!("g{number}")).collect();
        for id in &ids {
            lab.bundle(id, pod);
        }
        let addresses: Vec<String> = std::thread::scope(|scope| {
            let start = |id: &'_ String| lab.start(id, &params(id)).unwrap();
            let threads: Vec<_> = ids.iter().map(|id| scope.spawn(move || start(id))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(addresses.iter().all(|address| *address == addresses[0]));
        let served = |id: &&String| lab.directory.path().join(id).join("server").exists();
        let begun = Instant::now();
        while !ids.iter().any(|id| served(&id)) {
            assert!(begun.elapsed() < Duration::from_secs(30), "no server");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(100));
        let servers: Vec<_> = ids.iter().filter(served).collect();
        assert_eq!(servers.len(), 1);
        lab.server(servers[0]);
    }

    #[test]
    fn before_2_3_the_answer_is_the_address_alone() {
        let lab = Lab::new();
        let mut answer = Vec::new();
        start(&arguments("c1"), &lab.serve("c1"), b"", &mut answer).unwrap();
        let address = Address::new(lab.directory.path(), "/c.sock", "n", "c1").unwrap();
        assert_eq!(answer, address.to_string().as_bytes());
        assert_eq!(lab.server("c1")[1], "/t");
    }

    #[test]
    fn when_it_fails_neither_server_nor_socket_is_left() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let lab = Lab::new();
        let input = params("c1").write_to_bytes().unwrap();
        let failed = start(&arguments("c1"), &lab.serve("c1"), &input, &mut Full);
        assert!(matches!(failed, Err(StartError::Answer(_))), "{failed:?}");

        let serve = Serve { program: "/none".into(), ..lab.serve("c1") };
        let failed = start(&arguments("c1"), &serve, &input, &mut Vec::new());
        assert!(matches!(failed, Err(StartError::Spawn { .. })), "{failed:?}");

        let options = RuncOptions { shim_cgroup: "/no/such/one".into(), ..RuncOptions::default() };
        let mut asked = params("c1");
        asked.extensions.push(Extension {
            value: Some(Any {
                type_url: "containerd.runc.v1.Options".into(),
                value: options.write_to_bytes().unwrap(),
                ..Any::default()
            })
            .into(),
            ..Extension::default()
        });
        let failed = lab.start("c1", &asked);
        assert!(matches!(failed, Err(StartError::Cgroup { .. })), "{failed:?}");

        assert_eq!(lab.sockets(), 0);
        // They were waited for, so they cannot say anything any more.
        let _ = fs::remove_file(lab.directory.path().join("c1/server"));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!lab.directory.path().join("c1/server").exists());
    }

    #[test]
    fn what_is_wrong_with_the_container_is_said_before_anything_is_made() {
        let lab = Lab::new();
        let asked = params("c1");
        lab.bundle("c1", "not json");
        let error = lab.start("c1", &asked).unwrap_err();
        assert!(error.to_string().contains("config.json is not an OCI configuration"), "{error}");
        lab.bundle("c1", "{}");
        let nowhere = BootstrapParams { containerd_ttrpc_address: String::new(), ..asked };
        let serve = Serve { ttrpc_address: String::new(), ..lab.serve("c1") };
        let input = nowhere.write_to_bytes().unwrap();
        let failed = start(&arguments("c1"), &serve, &input, &mut Vec::new());
        assert!(matches!(failed, Err(StartError::NoEvents)));
        let other = params("c2");
        assert!(matches!(lab.start("c1", &other), Err(StartError::Request(_))));
        assert_eq!(lab.sockets(), 0);
        assert!(!lab.directory.path().join("c1/address").exists());
    }

    #[test]
    fn the_executable_is_this_one_by_its_path() {
        assert_eq!(own_executable(), std::env::current_exe().unwrap());
    }
}

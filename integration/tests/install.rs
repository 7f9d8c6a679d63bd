//! `make install` and `make uninstall`, into a directory; and that samples name what is installed.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use saphyr::{LoadableYamlNode as _, Yaml};
use stasis_integration::manual;
use tempfile::TempDir;

const PROGRAMS: [&str; 3] = ["containerd-shim-runc-stasis", "stasis", "stasis-runc"];

/// All that is installed: below the prefix, a program (x), a document (-) or a link.
const INSTALLED: &str = "\
x bin/containerd-shim-runc-stasis
x bin/stasis
x bin/stasis-runc
> lib/stasis/containerd-shim-runc-v2
- share/bash-completion/completions/stasis
- share/bash-completion/completions/stasis-runc
- share/doc/stasis/LICENSE
- share/doc/stasis/README.md
- share/doc/stasis/config.toml
- share/doc/stasis/containerd/config-1.x.toml
- share/doc/stasis/containerd/config-2.x.toml
- share/doc/stasis/docker/README.md
- share/doc/stasis/docker/daemon.json
- share/doc/stasis/kubernetes/Dockerfile
- share/doc/stasis/kubernetes/daemonset.yaml
- share/doc/stasis/kubernetes/runtimeclass.yaml
x share/doc/stasis/kubernetes/stasis-node
- share/doc/stasis/podman/stasis.conf
- share/fish/vendor_completions.d/stasis-runc.fish
- share/fish/vendor_completions.d/stasis.fish
- share/man/man1/stasis-check.1
- share/man/man1/stasis-inspect.1
- share/man/man1/stasis-ps.1
- share/man/man1/stasis-repair.1
- share/man/man1/stasis-resume.1
- share/man/man1/stasis-suspend.1
- share/man/man1/stasis.1
- share/man/man5/stasis-config.toml.5
- share/man/man8/containerd-shim-runc-stasis.8
- share/man/man8/stasis-runc.8
- share/zsh/site-functions/_stasis
- share/zsh/site-functions/_stasis-runc
";

/// What is made of the command line of stasis.
static GENERATED: LazyLock<TempDir> = LazyLock::new(|| {
    let directory = TempDir::new().unwrap();
    // Others than its owner read it: make runs as one who may do nothing that others may not.
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    manual::make(directory.path()).unwrap();
    directory
});

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn text(path: &str) -> String {
    fs::read_to_string(project().join(path)).unwrap()
}

/// A directory to install into, and one with stand-ins for what cargo builds.
struct Place {
    binaries: TempDir,
    generated: PathBuf,
    root: TempDir,
    prefix: &'static str,
}

impl Place {
    fn new(prefix: &'static str) -> Self {
        let binaries = TempDir::new().unwrap();
        for program in PROGRAMS {
            let path = binaries.path().join(program);
            fs::write(&path, program).unwrap();
            // The mode is install's business.
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        let generated = GENERATED.path().to_owned();
        Self { binaries, generated, root: TempDir::new().unwrap(), prefix }
    }

    /// Runs `make`, as one who may do nothing that others may not.
    fn make(&self, target: &str) -> Output {
        let root = nix::unistd::geteuid().is_root();
        let mut command = Command::new(if root { "setpriv" } else { "make" });
        if root {
            command.args(["--bounding-set", "-all", "--inh-caps", "-all", "make"]);
        }
        command
            .current_dir(project())
            .env_remove("MAKEFLAGS")
            .env_remove("MAKELEVEL")
            .arg(target)
            .arg(format!("PREFIX={}", self.prefix))
            .arg(format!("DESTDIR={}", self.root.path().display()))
            .arg(format!("BINARIES={}", self.binaries.path().display()))
            .arg(format!("GENERATED={}", self.generated.display()))
            .output()
            .unwrap()
    }

    fn succeed(&self, target: &str) {
        let output = self.make(target);
        assert!(output.status.success(), "{output:?}");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(self.prefix.trim_start_matches('/')).join(name)
    }

    /// All files, in the form of [`INSTALLED`].
    fn list(&self) -> String {
        let mut lines = BTreeMap::new();
        let prefix = self.path("");
        each_file(self.root.path(), &mut |path| {
            let name = path.strip_prefix(&prefix).unwrap_or(path).display().to_string();
            let metadata = path.symlink_metadata().unwrap();
            let kind = match metadata.permissions().mode() & 0o777 {
                _ if metadata.is_symlink() => '>',
                0o755 => 'x',
                0o644 => '-',
                _ => '?',
            };
            lines.insert(name.clone(), format!("{kind} {name}\n"));
        });
        lines.into_values().collect()
    }
}

fn each_file(directory: &Path, see: &mut dyn FnMut(&Path)) {
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            each_file(&entry.path(), see);
        } else {
            see(&entry.path());
        }
    }
}

#[test]
fn what_is_installed_is_what_is_removed() {
    for prefix in ["/usr/local", "/opt/stasis"] {
        let place = Place::new(prefix);
        place.succeed("install");
        assert_eq!(place.list(), INSTALLED);
        for program in PROGRAMS {
            let path = place.path("bin").join(program);
            assert_eq!(fs::read_to_string(path).unwrap(), program);
        }
        let v2 = fs::read_link(place.path("lib/stasis/containerd-shim-runc-v2")).unwrap();
        assert_eq!(v2, Path::new(prefix).join("bin/containerd-shim-runc-stasis"));

        place.succeed("install");
        assert_eq!(place.list(), INSTALLED, "the second time");

        let foreign = place.path("bin/other");
        fs::write(&foreign, "").unwrap();
        place.succeed("uninstall");
        assert_eq!(place.list(), "? bin/other\n".replace('?', &mode_of(&foreign)));
        for ours in ["lib/stasis", "share/doc/stasis"] {
            assert!(!place.path(ours).exists(), "{ours} is left");
        }
        place.succeed("uninstall");
    }
}

fn mode_of(path: &Path) -> String {
    let mode = fs::metadata(path).unwrap().permissions().mode() & 0o777;
    if mode == 0o644 { "-".to_owned() } else { "?".to_owned() }
}

#[test]
fn a_file_that_somebody_put_beside_ours_stays() {
    let place = Place::new("/usr");
    place.succeed("install");
    let note = place.path("share/doc/stasis/note");
    fs::write(&note, "").unwrap();
    place.succeed("uninstall");
    assert!(note.exists());
}

/// Nothing is built, in particular not as root, and nothing is half installed.
#[test]
fn without_binaries_nothing_happens() {
    let place = Place::new("/usr/local");
    fs::remove_file(place.binaries.path().join("stasis-runc")).unwrap();
    let output = place.make("install");
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("stasis-runc; run: make release"), "{said}");
    assert_eq!(place.list(), "");
}

#[test]
fn without_pages_and_completions_nothing_happens() {
    let mut place = Place::new("/usr/local");
    place.generated = place.root.path().join("nothing");
    let output = place.make("install");
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("nothing/man/stasis.1; run: make release"), "{said}");
    assert_eq!(place.list(), "");
}

#[test]
fn all_that_is_generated_is_installed() {
    let place = Place::new("/usr/local");
    place.succeed("install");
    let mut count = 0;
    for (from, to) in [
        ("man", "share/man/man1"),
        ("bash", "share/bash-completion/completions"),
        ("zsh", "share/zsh/site-functions"),
        ("fish", "share/fish/vendor_completions.d"),
    ] {
        for entry in fs::read_dir(GENERATED.path().join(from)).unwrap() {
            let entry = entry.unwrap();
            let installed = place.path(to).join(entry.file_name());
            assert_eq!(fs::read(&installed).unwrap(), fs::read(entry.path()).unwrap());
            count += 1;
        }
    }
    assert_eq!(count, 10);
}

/// The paths of ours in a text, below this directory.
fn named<'a>(text: &'a str, below: &str) -> Vec<&'a str> {
    let ends = |c: char| c.is_whitespace() || "\"',;)`".contains(c);
    text.split(ends).filter(|word| word.starts_with(below) && word.contains("stasis")).collect()
}

#[test]
fn samples_name_what_is_installed() {
    let place = Place::new("/usr/local");
    place.succeed("install");
    for sample in [
        "config/containerd/config-1.x.toml",
        "config/containerd/config-2.x.toml",
        "config/docker/daemon.json",
        "config/podman/stasis.conf",
    ] {
        let text = text(sample);
        let named = named(&text, "/usr/local/");
        assert!(!named.is_empty(), "{sample}");
        for path in named {
            assert!(place.root.path().join(&path[1..]).exists(), "{sample} names {path}");
        }
    }
}

fn one<'a>(documents: &'a [Yaml<'a>], kind: &str) -> &'a Yaml<'a> {
    let mut found = documents.iter().filter(|document| document["kind"].as_str() == Some(kind));
    let document = found.next().unwrap_or_else(|| panic!("no {kind}"));
    assert!(found.next().is_none(), "two of {kind}");
    document
}

fn list<'a>(yaml: &'a Yaml<'a>) -> &'a [Yaml<'a>] {
    yaml.as_vec().unwrap_or_else(|| panic!("no list: {yaml:?}"))
}

fn string<'a>(yaml: &'a Yaml<'a>) -> &'a str {
    yaml.as_str().unwrap_or_else(|| panic!("no string: {yaml:?}"))
}

#[test]
fn paths_that_would_be_others_are_refused() {
    for prefix in ["/usr/a b", "relative", ""] {
        let place = Place::new(prefix);
        for target in ["install", "uninstall"] {
            let output = place.make(target);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && said.contains("one path"), "{prefix}: {said}");
        }
        assert_eq!(fs::read_dir(place.root.path()).unwrap().count(), 0);
    }
}

#[test]
fn the_daemonset_its_image_and_the_runtime_class_agree() {
    let (daemonset, class) =
        (text("config/kubernetes/daemonset.yaml"), text("config/kubernetes/runtimeclass.yaml"));
    let documents = Yaml::load_from_str(&daemonset).unwrap();
    let classes = Yaml::load_from_str(&class).unwrap();
    let (daemonset, class) = (one(&documents, "DaemonSet"), one(&classes, "RuntimeClass"));
    let template = &daemonset["spec"]["template"];
    let pod = &template["spec"];

    let namespace = &one(&documents, "Namespace")["metadata"]["name"];
    assert_eq!(&daemonset["metadata"]["namespace"], namespace);
    let labels = &daemonset["spec"]["selector"]["matchLabels"];
    assert_eq!(labels, &template["metadata"]["labels"]);

    // Pods of the class go where it is installed.
    let scheduling = &class["scheduling"];
    for (label, value) in scheduling["nodeSelector"].as_mapping().unwrap() {
        assert_eq!(&pod["nodeSelector"][string(label)], value);
    }
    assert_eq!(scheduling["tolerations"], pod["tolerations"]);

    // What the pods run, and where it is.
    let script = text("config/kubernetes/stasis-node");
    let containers = [&pod["initContainers"][0], &pod["containers"][0]];
    let words = containers.map(|container| string(&container["args"][0]));
    let hook = &containers[1]["lifecycle"]["preStop"]["exec"]["command"];
    let probe = &containers[1]["readinessProbe"]["exec"]["command"];
    for word in [words[0], words[1], string(&hook[1]), string(&probe[1])] {
        assert!(script.contains(&format!("stasis-node {word} ")), "stasis-node has no {word}");
    }
    let image = text("config/kubernetes/Dockerfile");
    for command in [hook, probe] {
        let program = format!("/usr/local/bin/{}", string(&command[0]));
        assert!(image.contains(&program), "the image has no {program}");
    }

    // The same paths on the node, in the pods, and where the image was installed.
    let host = |name: &str| {
        let volume = list(&pod["volumes"]).iter().find(|volume| string(&volume["name"]) == name);
        string(&volume.unwrap_or_else(|| panic!("no volume {name}"))["hostPath"]["path"])
    };
    for container in containers {
        for mount in list(&container["volumeMounts"]) {
            assert_eq!(string(&mount["mountPath"]), host(string(&mount["name"])));
        }
    }
    let programs = host("programs");
    assert!(script.contains(&format!("prefix=${{STASIS_PREFIX:-{programs}}}\n")), "{programs}");
    assert!(script.contains(&format!("etc=${{STASIS_CONTAINERD:-{}}}\n", host("containerd"))));
    assert!(image.contains(&format!("make install PREFIX={programs} DESTDIR=/stage\n")));
    assert!(image.contains("COPY --from=build /stage /stage\n"));
    assert!(script.contains("stage=${STASIS_STAGE:-/stage}\n"));
    let shim = script.lines().find_map(|line| line.strip_prefix("shim=$prefix/"));
    let shim = shim.expect("the script has no shim");
    assert!(INSTALLED.contains(&format!("x {shim}\n")), "{shim} is not installed");
    let name = string(&class["handler"]);
    assert!(script.contains(&format!(".containerd.runtimes.{name}]\n")), "{name}");
    for sample in ["config/containerd/config-1.x.toml", "config/containerd/config-2.x.toml"] {
        assert!(text(sample).contains(&format!(".containerd.runtimes.{name}]\n")), "{sample}");
    }
}

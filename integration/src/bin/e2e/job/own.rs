//! A container in a bundle of our own, run by `stasis-runc` with no engine above it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::unistd::Pid;
use serde_json::{Value, json};
use stasis_integration::bare::Bare;
use stasis_integration::case::Case;
use stasis_integration::ipc::Group;
use stasis_integration::overlay::Overlay;
use stasis_integration::{command, leaks};

use super::FILE;

const LIMIT: Duration = Duration::from_secs(60);

/// One with the emulated GPU and a root file system that it may write to.
pub(crate) struct Own<'a> {
    case: &'a Case<'a>,
    pub(crate) bare: Bare,
    overlay: Overlay,
    pub(super) group: Group,
}

impl<'a> Own<'a> {
    /// One that runs this program. Its name is the test's and `name`.
    pub(crate) fn new(case: &'a Case<'a>, name: &str, program: &[&str]) -> Result<Self> {
        let parent = std::env::var("LAB_ID")?;
        let id = format!("{}-{name}", case.name());
        let directory = case.path(&format!("bundle-{name}"));
        let overlay = Overlay::mount(&case.path("../image/rootfs").canonicalize()?, &directory)?;
        let bare = Bare::new(&directory, &id, &parent, overlay.root(), program)?;
        let bare = bare.with_root(&case.path("runtime-root"));
        bare.add_gpu(&case.gpu)?;
        bare.change(|spec| spec["root"]["readonly"] = false.into())?;
        Ok(Self { case, bare, overlay, group: Group::new(4) })
    }

    /// Four processes, with the annotation.
    pub(super) fn annotated(case: &'a Case<'a>, name: &str) -> Result<Self> {
        let own = Self::new(case, name, &super::IPC)?;
        own.annotate(FILE)?;
        Ok(own)
    }

    /// One of these that runs, and was asked once.
    pub(super) fn started(case: &'a Case<'a>, name: &str) -> Result<Self> {
        let mut own = Self::annotated(case, name)?;
        own.start()?;
        own.expect()?;
        Ok(own)
    }

    /// The same configuration, files and number as another's, for an image of that one.
    pub(super) fn like(other: &Self, name: &str) -> Result<Self> {
        let mut own = Self::new(other.case, name, &[])?;
        let spec: Value = serde_json::from_str(&other.bare.spec()?)?;
        own.bare.change(|new| {
            let (root, cgroup) = (new["root"].clone(), new["linux"]["cgroupsPath"].clone());
            *new = spec;
            new["root"] = root;
            new["linux"]["cgroupsPath"] = cgroup;
        })?;
        own.group = other.group;
        Ok(own)
    }

    pub(super) fn annotate(&self, annotation: &str) -> Result<()> {
        let (name, value) = annotation.split_once('=').context("an annotation")?;
        self.bare.change(|spec| spec["annotations"][name] = value.into())
    }

    /// Adds to the environment of its first process.
    pub(super) fn set(&self, entry: &str) -> Result<()> {
        self.bare.change(|spec| {
            if let Some(entries) = spec["process"]["env"].as_array_mut() {
                entries.push(json!(entry));
            }
        })
    }

    /// Its processes are this user's, without any capability.
    pub(super) fn as_user(&self, uid: u32) -> Result<()> {
        let everybodys = Permissions::from_mode(0o1777);
        fs::set_permissions(self.root().join("tmp"), everybodys)?;
        self.bare.change(|spec| {
            spec["process"]["user"] = json!({ "uid": uid, "gid": uid });
            spec["process"]["capabilities"] = json!({});
            for mount in spec["mounts"].as_array_mut().into_iter().flatten() {
                if mount["destination"] == "/data" {
                    mount["options"] = json!(["mode=1777"]);
                }
            }
        })
    }

    fn runtime(&self) -> PathBuf {
        self.case.runtime.wrapper()
    }

    /// Its root file system as the host sees it.
    pub(super) fn root(&self) -> &Path {
        self.overlay.root()
    }

    /// A file as one of its processes sees it.
    pub(super) fn inside(&self, path: &str) -> Result<PathBuf> {
        Ok(PathBuf::from(format!("/proc/{}/root{path}", self.init()?)))
    }

    pub(crate) fn init(&self) -> Result<Pid> {
        self.bare.pid()
    }

    pub(crate) fn start(&mut self) -> Result<()> {
        self.bare.create(&self.runtime())?;
        self.bare.start(&self.runtime())
    }

    /// `create` that has to fail, and leaves no container; gives the error.
    pub(super) fn create_fails(&mut self) -> Result<String> {
        let _ = fs::remove_file(self.bare.path("runtime.log"));
        match self.bare.create(&self.runtime()) {
            Ok(()) => bail!("{} was created", self.bare.id()),
            Err(error) => {
                self.expect_nothing()?;
                Ok(format!("{error:#}"))
            }
        }
    }

    /// The next answer is what it should be.
    pub(super) fn expect(&mut self) -> Result<()> {
        let init = self.init()?;
        self.group.expect(init)
    }

    pub(super) fn exec(&self, program: &[&str]) -> Result<String> {
        self.bare.exec(&self.runtime(), &[], program)
    }

    /// Another process joins it.
    pub(super) fn join(&mut self) -> Result<()> {
        self.exec(&["/bin/ipc", "--join"])?;
        self.group.grow();
        Ok(())
    }

    /// `checkpoint`, with these flags.
    pub(super) fn checkpoint_call(&self, image: &Path, flags: &[&str]) -> Command {
        self.bare.checkpoint(&self.runtime(), &image.to_string_lossy(), flags)
    }

    /// A checkpoint after which it runs on.
    pub(super) fn checkpoint(&self, image: &Path) -> Result<()> {
        command::succeed(&mut self.checkpoint_call(image, &["--leave-running"]), LIMIT).map(drop)
    }

    /// A checkpoint of another user's processes, after which they go on. CRIU cannot dump them where
    /// it is root without `CAP_SYS_RESOURCE`, as in some sandboxes.
    pub(super) fn checkpoint_as_far_as_criu(&mut self, image: &Path) -> Result<()> {
        let mut checkpoint = self.checkpoint_call(image, &["--leave-running"]);
        let finished = command::run(&mut checkpoint, LIMIT)?;
        if !finished.status.success() {
            says(&finished.stderr, &["phase criu-dump", "Can't get rlimit"])?;
        }
        self.expect()
    }

    /// A checkpoint that ends it, and its removal.
    pub(super) fn checkpoint_and_end(&self, image: &Path) -> Result<()> {
        command::succeed(&mut self.checkpoint_call(image, &[]), LIMIT)?;
        self.delete()
    }

    /// A checkpoint that fails, after which it runs on and answers right; gives the error.
    pub(super) fn refused(&mut self, image: &Path) -> Result<String> {
        let error = command::fail(&mut self.checkpoint_call(image, &["--leave-running"]), LIMIT)?;
        ensure!(!image.join("stasis.json").exists(), "a failed checkpoint left a manifest");
        self.expect().with_context(|| format!("after {error}"))?;
        Ok(error)
    }

    pub(super) fn restore(&mut self, image: &Path) -> Result<()> {
        let _ = fs::remove_file(self.bare.path("runtime.log"));
        self.bare.restore(&self.runtime(), &image.to_string_lossy())
    }

    /// A restore that has to fail, and leaves nothing; gives the error.
    pub(super) fn restore_fails(&mut self, image: &Path) -> Result<String> {
        let before = self.bare.spec()?;
        match self.restore(image) {
            Ok(()) => bail!("{} was restored", self.bare.id()),
            Err(error) => {
                self.expect_nothing()?;
                ensure!(self.own_job().is_none(), "the failed restore left its job file");
                ensure!(self.bare.spec()? == before, "the failed restore left another config.json");
                Ok(format!("{error:#}"))
            }
        }
    }

    /// A checkpoint that leaves it running, one that ends it, and a restore; then it goes.
    pub(super) fn goes_on(mut self) -> Result<()> {
        self.checkpoint(&self.case.path("running"))?;
        self.expect()?;
        let image = self.case.path("image");
        self.checkpoint_and_end(&image)?;
        self.restore(&image)?;
        self.expect()?;
        self.delete()
    }

    /// `delete --force`, after which nothing of it is left.
    pub(crate) fn delete(&self) -> Result<()> {
        self.bare.delete(&self.runtime())?;
        self.expect_nothing()?;
        ensure!(self.own_job().is_none(), "the job file of {} is left", self.bare.id());
        Ok(())
    }

    /// The runtime knows nothing of it, and it has no processes, cgroups and mounts.
    fn expect_nothing(&self) -> Result<()> {
        let id = self.bare.id();
        ensure!(!self.bare.root().join(id).exists(), "the runtime knows {id}");
        let parent = std::env::var("LAB_ID")?;
        leaks::container(&parent, id)
    }

    /// The directory of its job file, if it has one.
    pub(super) fn own_job(&self) -> Option<PathBuf> {
        let name = format!("{}.job", self.bare.id());
        let mut all = leaks::jobs(&self.case.runtime.state()).into_iter();
        all.find(|path| path.file_name().is_some_and(|found| found == name.as_str()))
    }
}

impl Drop for Own<'_> {
    fn drop(&mut self) {
        let _ = self.bare.delete(&self.runtime());
    }
}

/// The error says all of these.
pub(super) fn says(error: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(error.contains(word), "{word:?} is not in: {error}");
    }
    Ok(())
}

/// What is in the files of an image, to see that they stay as they are.
pub(super) fn digest(image: &Path) -> Result<String> {
    let mut sums = Command::new("sh");
    sums.args(["-c", "find . -type f | sort | xargs sha256sum"]).current_dir(image);
    command::succeed(&mut sums, LIMIT)
}

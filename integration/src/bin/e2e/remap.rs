//! Other GPUs than those of the checkpoint: at a restore, and when a suspended container is resumed.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::unistd::Pid;
use serde_json::json;
use stasis_integration::bare::Bare;
use stasis_integration::case::{Case, PORT};
use stasis_integration::gpu::Node;
use stasis_integration::overlay::Overlay;
use stasis_integration::{command, processes, udp};

use crate::Test;
use crate::suspend::Stasis;

const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("restored_on_another", restored_on_another),
        Test::new("restored_by_annotation", by_annotation),
        Test::new("what_it_may_not_have_is_refused", not_its_own),
        Test::new("an_old_driver_is_refused", old_driver),
        Test::new("another_chip_is_refused", another_chip),
        Test::new("no_room_there", no_room),
        Test::new("resumed_on_another", resumed_on_another),
        Test::new("begins_suspended", begins_suspended),
        Test::new("begins_suspended_on_another", begins_suspended_on_another),
    ]
}

/// A counter in a bundle, restored into others that have other GPUs.
struct Moving<'a> {
    case: &'a Case<'a>,
    bare: Bare,
    /// Mounted for as long as it lasts.
    _overlay: Overlay,
    count: u64,
}

impl<'a> Moving<'a> {
    /// One that has these GPUs' nodes, and was asked once.
    fn started(case: &'a Case<'a>, gpus: &[usize]) -> Result<Self> {
        Self::started_as(case, "a", gpus)
    }

    fn started_as(case: &'a Case<'a>, name: &str, gpus: &[usize]) -> Result<Self> {
        let mut moving = Self::new(case, name, gpus)?;
        moving.bare.create(&case.runtime.wrapper())?;
        moving.bare.start(&case.runtime.wrapper())?;
        moving.expect()?;
        Ok(moving)
    }

    fn new(case: &'a Case<'a>, name: &str, gpus: &[usize]) -> Result<Self> {
        case.gpu.give(gpus);
        let parent = std::env::var("LAB_ID")?;
        let id = format!("{}-{name}", case.name());
        let directory = case.path(&format!("bundle-{name}"));
        let overlay = Overlay::mount(&case.path("../image/rootfs").canonicalize()?, &directory)?;
        let program = ["/bin/counter", "--pattern-mib", "4"];
        let bare = Bare::new(&directory, &id, &parent, overlay.root(), &program)?;
        let bare = bare.with_root(&case.path("runtime-root"));
        bare.add_gpu(&case.gpu)?;
        // CRIU restores into the same cgroup.
        bare.change(|spec| {
            spec["linux"]["cgroupsPath"] = json!(format!("/{parent}/{}", case.name()));
        })?;
        Ok(Self { case, bare, _overlay: overlay, count: 101 })
    }

    /// A checkpoint that ends it; then a container with these GPUs for its image.
    fn moved(self, gpus: &[usize]) -> Result<Self> {
        let image = self.case.path(&format!("image-{}", self.count));
        let runtime = self.case.runtime.wrapper();
        let mut checkpoint = self.bare.checkpoint(&runtime, &image.to_string_lossy(), &[]);
        command::succeed(&mut checkpoint, LIMIT)?;
        self.bare.delete(&runtime)?;
        let name = self.count.to_string();
        let mut moved = Self::new(self.case, &name, gpus)?;
        moved.count = self.count;
        Ok(moved)
    }

    fn image(&self) -> String {
        self.case.path(&format!("image-{}", self.count)).to_string_lossy().into_owned()
    }

    fn annotate(&self, key: &str, value: &str) -> Result<()> {
        self.bare.change(|spec| spec["annotations"][format!("dev.stasis.{key}")] = value.into())
    }

    fn restore(&mut self) -> Result<()> {
        let _ = fs::remove_file(self.bare.path("runtime.log"));
        let image = self.image();
        self.bare.restore(&self.case.runtime.wrapper(), &image)
    }

    /// A restore that has to fail and leaves nothing.
    fn refused(&mut self, words: &[&str]) -> Result<()> {
        let before = self.bare.spec()?;
        let Err(error) = self.restore() else { anyhow::bail!("it was restored") };
        let error = format!("{error:#}");
        for word in words {
            ensure!(error.contains(word), "{word:?} is not in: {error}");
        }
        ensure!(!self.bare.root().join(self.bare.id()).exists(), "a container is left");
        ensure!(self.bare.spec()? == before, "config.json was changed");
        Ok(())
    }

    /// It answers with the next number.
    fn expect(&mut self) -> Result<()> {
        let answer = udp::ask(self.bare.pid()?, PORT)?;
        ensure!(answer == self.count, "{answer} instead of {}", self.count);
        self.count += 1;
        Ok(())
    }

    /// The only GPU that it uses.
    fn is_on(&self, gpu: usize) -> Result<()> {
        uses(self.case, self.bare.pid()?, gpu)
    }

    fn stasis(&self, arguments: &[&str]) -> Vec<String> {
        let root = self.bare.root().to_string_lossy().into_owned();
        let end = [self.bare.id().to_owned(), "--root".to_owned(), root];
        arguments.iter().map(|argument| (*argument).to_owned()).chain(end).collect()
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        let all = self.stasis(arguments);
        Stasis::new(self.case).run(&all.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn fails(&self, arguments: &[&str], words: &[&str]) -> Result<()> {
        let all = self.stasis(arguments);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let error = Stasis::new(self.case).fails(&all)?;
        for word in words {
            ensure!(error.contains(word), "{word:?} is not in: {error}");
        }
        Ok(())
    }

    fn deleted(&self) -> Result<()> {
        self.bare.delete(&self.case.runtime.wrapper())
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let _ = self.bare.delete(&self.case.runtime.wrapper());
    }
}

/// By its open files, and by where its memory lies.
fn uses(case: &Case, pid: Pid, gpu: usize) -> Result<()> {
    let open = processes::open_files(pid);
    // The driver opens all that it sees.
    ensure!(open.contains(&Node::of(gpu).path), "it has {open:?} open");
    for other in 0..2 {
        let used = case.gpu.used(other)?;
        ensure!((used > 0) == (other == gpu), "{used} bytes of GPU {other} are in use");
    }
    Ok(())
}

fn restored_on_another(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    let moving = Moving::started(case, &[0])?;
    moving.is_on(0)?;
    let mut moving = moving.moved(&[1])?;
    moving.restore()?;
    moving.expect()?;
    moving.is_on(1)?;
    // And once more, back to the first.
    let mut moving = moving.moved(&[0])?;
    moving.restore()?;
    moving.expect()?;
    moving.is_on(0)?;
    // One that has both stays where it is.
    let mut moving = moving.moved(&[0, 1])?;
    moving.restore()?;
    moving.expect()?;
    moving.is_on(0)?;
    moving.deleted()
}

fn by_annotation(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    let mut moving = Moving::started(case, &[0, 1])?.moved(&[0, 1])?;
    // The other one is named, too: the processes could see it.
    moving.annotate("device-map", &format!("0={}", case.gpu.uuid(1)))?;
    moving.restore()?;
    moving.expect()?;
    moving.is_on(1)?;
    moving.deleted()
}

fn not_its_own(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    let mut moving = Moving::started(case, &[0])?.moved(&[0])?;
    for (map, words) in [
        ("0=1", [case.gpu.uuid(1), "the container has".to_owned()]),
        ("1=0", [case.gpu.uuid(1), "the processes saw".to_owned()]),
        ("0=7", ["no GPU number 7".to_owned(), "device-map".to_owned()]),
        ("here", ["OLD=NEW".to_owned(), "device-map".to_owned()]),
    ] {
        moving.annotate("device-map", map)?;
        let words: Vec<&str> = words.iter().map(String::as_str).chain(["not touched"]).collect();
        moving.refused(&words).with_context(|| map.to_owned())?;
    }
    moving.annotate("device-map", "0=0")?;
    moving.restore()?;
    moving.expect()?;
    moving.deleted()
}

fn old_driver(case: &Case) -> Result<()> {
    case.gpu.driver("570.86.10")?;
    case.gpu.count(2)?;
    let mut moving = Moving::started(case, &[0])?.moved(&[1])?;
    moving.refused(&[&case.gpu.uuid(0), "branch 580", "not touched"])
}

fn another_chip(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    case.gpu.configure(&["names=NVIDIA H200,NVIDIA A100"])?;
    let mut moving = Moving::started(case, &[0])?.moved(&[1])?;
    moving.refused(&["NVIDIA H200", "NVIDIA A100", "same chip", "not touched"])
}

/// Its memory is looked for where it goes, and not where it was.
fn no_room(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    case.gpu.configure(&["memory=6291456"])?;
    case.set(&stasis_integration::runtime::Settings::default().impatient(2))?;
    let mut moving = Moving::started(case, &[0])?.moved(&[1])?;
    case.gpu.give(&[1]);
    let other = case.start_counter(&["--pattern-mib", "4"])?;
    moving.refused(&[&case.gpu.uuid(1), "MiB free", "was killed"])?;
    case.remove(&other)?;
    moving.restore()?;
    moving.expect()?;
    moving.is_on(1)?;
    moving.deleted()
}

fn resumed_on_another(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    let mut moving = Moving::started(case, &[0, 1])?;
    for (to, gpu) in [("1".to_owned(), 1), (case.gpu.uuid(0), 0)] {
        moving.run(&["suspend"])?;
        moving.fails(&["resume", "--to", "5"], &["no GPU number 5", "suspended as before"])?;
        moving.run(&["resume", "--to", &to])?;
        moving.expect()?;
        moving.is_on(gpu)?;
    }
    moving.run(&["suspend"])?;
    moving.run(&["resume", "--device-map", "0=1"])?;
    moving.expect()?;
    moving.is_on(1)?;
    moving.deleted()?;
    let mut moving = Moving::started_as(case, "b", &[0])?;
    moving.run(&["suspend"])?;
    let own = case.gpu.uuid(0);
    let words = [own.as_str(), "and the container has", "suspended as before"];
    moving.fails(&["resume", "--to", "1"], &words)?;
    moving.run(&["resume"])?;
    moving.expect()?;
    moving.is_on(0)?;
    moving.deleted()
}

/// A warm one: its memory is on the host, and a GPU is given to it later.
fn begins_suspended(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    let mut moving = Moving::started(case, &[0])?.moved(&[0])?;
    moving.annotate("restore", "suspended")?;
    moving.restore()?;
    ensure!(case.gpu.used(0)? == 0, "it uses the GPU");
    ensure!(moving.run(&["resume"])?.contains("is resumed"), "it was not suspended");
    moving.expect()?;
    moving.is_on(0)?;
    moving.deleted()
}

fn begins_suspended_on_another(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    let mut moving = Moving::started(case, &[0])?.moved(&[1])?;
    moving.annotate("restore", "suspended")?;
    moving.restore()?;
    moving.fails(&["resume", "--to", "1"], &["on its way to other GPUs"])?;
    moving.run(&["resume"])?;
    moving.expect()?;
    moving.is_on(1)?;
    moving.deleted()
}

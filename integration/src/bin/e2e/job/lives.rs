//! The life of a container in a job, whoever manages it.

use anyhow::{Result, bail};
use nix::unistd::Pid;
use stasis_integration::ipc::Group;

use super::own::says;
use super::{IPC, LAUNCH};

/// How a container gets into a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    /// By the annotation.
    Annotation,
    /// By itself, with NVIDIA's utility.
    Launch,
}

impl Method {
    pub(super) const ALL: [(Self, &'static str); 2] =
        [(Self::Annotation, "annotation"), (Self::Launch, "launch")];

    /// Another process joins by `exec`.
    fn join(self, front: &dyn FrontEnd, id: &str, group: &mut Group) -> Result<()> {
        match self {
            Self::Annotation => front.exec(id, &["/bin/ipc", "--join"])?,
            Self::Launch => front.exec(id, &["/bin/sh", "-c", JOIN_LAUNCHED])?,
        };
        group.grow();
        Ok(())
    }
}

/// Starts another member in a container that has launched itself: what the documentation tells to do.
const JOIN_LAUNCHED: &str = "export CUDA_CHECKPOINT_JOB_FILE=$(tr '\\0' '\\n' </proc/1/environ | \
     sed -n 's|^CUDA_CHECKPOINT_JOB_FILE=/proc/self/|/proc/1/|p'); exec /bin/ipc --join";

/// Who manages containers.
pub(crate) trait FrontEnd {
    /// Starts one with a GPU.
    fn start(&self, annotated: bool, program: &[&str]) -> Result<String>;
    /// Its first process, and the port on which it is asked.
    fn address(&self, id: &str) -> Result<(Pid, u16)>;
    fn exec(&self, id: &str, program: &[&str]) -> Result<String>;
    /// A checkpoint after which it runs on.
    fn checkpoint(&self, id: &str, image: &str) -> Result<()>;
    /// A checkpoint after which it does not run.
    fn checkpoint_and_end(&self, id: &str, image: &str) -> Result<()>;
    /// Restores an image into a container that has ended, or else into another one.
    fn restore(&self, image: &str, into: Option<&str>) -> Result<String>;
    /// Ends one.
    fn end(&self, id: &str) -> Result<()>;
    /// Whether one image can be restored into two containers at the same time.
    fn has_two_of_an_image(&self) -> bool;
    /// What this one can do besides.
    fn more(&self, _id: &str, _group: &mut Group) -> Result<()> {
        Ok(())
    }

    /// The next answer is what it should be.
    fn expect(&self, id: &str, group: &mut Group) -> Result<()> {
        let (init, port) = self.address(id)?;
        group.expect_at(init, port)
    }
}

/// Four processes that share memory, and a fifth by `exec`; checkpoints that leave them running, and
/// one that does not; two restores of it, and another checkpoint and restore of each.
pub(super) fn whole_life(front: &dyn FrontEnd, method: Method) -> Result<()> {
    let mut group = Group::new(4);
    let id = if method == Method::Annotation {
        front.start(true, &IPC)?
    } else {
        front.start(false, &[&LAUNCH[..], &IPC].concat())?
    };
    front.expect(&id, &mut group)?;
    method.join(front, &id, &mut group)?;
    front.expect(&id, &mut group)?;
    for image in ["running-1", "running-2", "running-3"] {
        front.checkpoint(&id, image)?;
        front.expect(&id, &mut group)?;
    }
    front.more(&id, &mut group)?;
    let at_last = group;
    front.checkpoint(&id, "running-4")?;
    front.expect(&id, &mut group)?;
    front.checkpoint_and_end(&id, "ended")?;
    if front.has_two_of_an_image() {
        at_once(front, method, &id, group)?;
    } else {
        in_turn(front, method, &id, group)?;
    }
    // What was made of it while it ran is as good.
    let mut group = at_last;
    let id = front.restore("running-4", Some(&id))?;
    front.expect(&id, &mut group)?;
    front.end(&id)
}

/// The driver would lose what they share, and says nothing: no checkpoint is made, and all go on.
pub(super) fn refused(front: &dyn FrontEnd) -> Result<()> {
    let mut group = Group::new(4);
    let id = front.start(false, &IPC)?;
    front.expect(&id, &mut group)?;
    let Err(error) = front.checkpoint(&id, "image") else { bail!("it was not refused") };
    let both =
        ["4 processes use CUDA", "dev.stasis.job=file", "610", "dev.stasis.multi-process=allow"];
    says(&format!("{error:#}"), &both)?;
    front.expect(&id, &mut group)?;
    front.end(&id)
}

fn at_once(front: &dyn FrontEnd, method: Method, ended: &str, group: Group) -> Result<()> {
    let mut first = (front.restore("ended", Some(ended))?, group);
    let mut second = (front.restore("ended", None)?, group);
    // Not equally often: they share nothing.
    front.expect(&first.0, &mut first.1)?;
    for (id, group) in [&mut first, &mut second] {
        front.expect(id, group)?;
    }
    for ((id, _), image) in [(&first, "first"), (&second, "second")] {
        front.checkpoint_and_end(id, image)?;
    }
    for ((id, group), image) in [(&mut first, "first"), (&mut second, "second")] {
        *id = front.restore(image, Some(id))?;
        front.expect(id, group)?;
    }
    for (id, group) in [&mut first, &mut second] {
        method.join(front, id, group)?;
        front.expect(id, group)?;
        front.end(id)?;
    }
    Ok(())
}

fn in_turn(front: &dyn FrontEnd, method: Method, ended: &str, at_checkpoint: Group) -> Result<()> {
    for image in ["first", "second"] {
        let mut group = at_checkpoint;
        let id = front.restore("ended", Some(ended))?;
        front.expect(&id, &mut group)?;
        front.checkpoint_and_end(&id, image)?;
        let id = front.restore(image, Some(&id))?;
        method.join(front, &id, &mut group)?;
        front.expect(&id, &mut group)?;
        front.end(&id)?;
    }
    Ok(())
}

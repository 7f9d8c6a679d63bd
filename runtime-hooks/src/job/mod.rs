//! Job files: what CUDA processes need that share GPU memory (`cuIpcGetMemHandle`).
//!
//! A container with the annotation `dev.stasis.job=file` is given one: [`launch`] has NVIDIA's utility
//! make it, [`directory`] is where it lies on this host, [`bundle`] tells the container of it. Others
//! bring their own, by `cuda-checkpoint --launch-job` or the variable. Either way the processes
//! themselves say at a checkpoint which file it is ([`find`]); [`given`] sees to it that each container
//! has its own.
//!
//! A job file is used once: fresh for each start of a container and each restore. The copy in the
//! image is taken frozen, when all are CHECKPOINTED, and never changes.

pub mod bundle;
pub mod directory;
pub mod given;
pub mod launch;
mod rootfs;

pub use directory::JobDirectory;

use oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};
use stasis_config::manifest::JobFile;

pub use crate::cuda::job::DESTINATION;
use crate::cuda::job::{FIRST_BRANCH, Identity, Job, Named, Neighbour, Unusable, Way};
use crate::cuda::{Driver, DriverError, DriverFacts, Steps};
use crate::error::Who;
use crate::journal::{Entry, Stage};
use crate::parts::{CudaProcess, who};
use crate::processes::{Process, ProcessId, Processes, ProcessesError, descends};
use crate::spec;

/// Why there is no job, or not this one.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The driver is too old for what is asked.
    #[error(
        "driver {found} has no jobs that keep shared GPU memory: annotation dev.stasis.job=file needs \
         branch {needed} or later (jobs.minimum-driver in config.toml)"
    )]
    Driver {
        /// Its version.
        found: String,
        /// The branch.
        needed: u32,
    },
    /// A process's job file cannot be used.
    #[error("{who}: {why}")]
    Unusable {
        /// Which process.
        who: Who,
        /// Why.
        why: Unusable,
    },
    /// Some are in a job and others not.
    #[error(
        "{who}: is not in the job of the other CUDA processes: it was started without {}; start it \
         with the value that {other} has, or end it",
        crate::cuda::job::VARIABLE
    )]
    Outside {
        /// The first that is not.
        who: Who,
        /// One that is.
        other: Who,
    },
    /// They are in several jobs.
    #[error(
        "{who} and {other} are in different jobs ({} names {named} and {other_named}): a container \
         is checkpointed as one job",
        crate::cuda::job::VARIABLE
    )]
    Several {
        /// One.
        who: Who,
        /// What it says.
        named: String,
        /// Another.
        other: Who,
        /// What that says.
        other_named: String,
    },
    /// The job file would not be there after a restore.
    #[error(
        "{who}: names a job file {path} that lies on a mount from outside the container, where \
         another container could use it at the same time: put it into the container's own file \
         system, or use the annotation dev.stasis.job=file"
    )]
    OnVolume {
        /// Which process.
        who: Who,
        /// Its path.
        path: String,
    },
    /// Restored processes are in another job than the image's.
    #[error("{0}")]
    NotTheImages(String),
    /// The file of the container on this host.
    #[error("{action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// With which file.
        path: std::path::PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The utility.
    #[error("{0}")]
    Utility(String),
    /// The container's own configuration.
    #[error("{0}")]
    Conflict(String),
    /// See there.
    #[error("{}", crate::error::chain(.0))]
    ConfigFile(#[from] crate::config_json::ConfigFileError),
    /// See there.
    #[error("{}", crate::error::chain(.0))]
    Journal(#[from] crate::journal::JournalError),
    /// See there.
    #[error("{}", crate::error::chain(.0))]
    Processes(#[from] ProcessesError),
    /// See there.
    #[error(transparent)]
    Helper(DriverError),
}

/// Whether this driver may have jobs. Then a member is operated in its job, whatever the job keeps; outside
/// of it, it is lost. So one whose version is not known may have them, if its steps are not those of 550;
/// a driver without jobs does not look at the variable.
#[must_use]
pub fn may_have(facts: &DriverFacts) -> bool {
    match facts.branch() {
        Some(branch) => branch >= FIRST_BRANCH,
        None => facts.steps == Steps::Separate,
    }
}

/// Whether jobs of this driver are relied on: it has the branch that the administrator trusts.
#[must_use]
pub fn trusted(facts: &DriverFacts, minimum: u32) -> bool {
    facts.branch().is_some_and(|branch| branch >= minimum)
}

/// Refuses a driver whose jobs would not keep what they are asked to.
pub fn require(facts: &DriverFacts, minimum: u32) -> Result<(), JobError> {
    if trusted(facts, minimum) {
        return Ok(());
    }
    let found = facts.driver_version.clone();
    let found = found.unwrap_or_else(|| "of unknown version (NVML does not tell)".to_owned());
    Err(JobError::Driver { found, needed: minimum })
}

/// The job that a container's CUDA processes are in, as it is noted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Membership {
    /// The job.
    pub job: Job,
    /// Where a restored container is to have its file from; none where no image is made.
    pub origin: Option<JobFile>,
}

/// The job of a container, as its processes say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The job.
    pub job: Job,
    /// What the first process says of its file.
    pub named: Named,
    /// Which process that is.
    pub who: Who,
    /// The first process that names a file in the hands of one that CRIU does not dump, and why that does
    /// not do for an image.
    pub outside_image: Option<(Who, Unusable)>,
}

/// The job that the CUDA processes are in; `None` if they are in none. All of them are in it, or it is
/// an error: a member that is operated outside of its job is lost, and so is one that is none.
pub fn find(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    init: ProcessId,
) -> Result<Option<Found>, JobError> {
    let all = processes.list()?;
    let neighbours: Vec<Neighbour> = all
        .iter()
        .map(|process| Neighbour {
            inner_pid: process.inner_pid,
            id: process.id,
            in_image: descends(&all, process, init.pid),
        })
        .collect();
    let asked: Vec<_> = cuda.iter().map(|process| process.process.id).collect();
    let mut named = driver.job_files(&asked, init, &neighbours).map_err(JobError::Helper)?;
    let mut found: Option<Found> = None;
    let mut outside: Option<Who> = None;
    let mut outside_image = None;
    for process in cuda {
        let who = process.who();
        let answer = match named.remove(&process.pid()) {
            Some(Ok(named)) => named,
            Some(Err(why)) => return Err(JobError::Unusable { who, why }),
            None => None,
        };
        if let Some(named) = &answer
            && outside_image.is_none()
            && let Some(why) = held_outside_image(&all, process.process.id, named, init)
        {
            outside_image = Some((who.clone(), why));
        }
        match (answer, &mut found) {
            (None, _) if processes.ending(process.process.id) => {}
            (None, _) => {
                outside.get_or_insert(who);
            }
            (Some(named), None) => {
                let job = Job { file: named.file, ways: vec![named.way.clone()] };
                found = Some(Found { job, named, who, outside_image: None });
            }
            (Some(named), Some(found)) if named.file == found.job.file => {
                found.job.ways.push(named.way);
            }
            (Some(other), Some(found)) => {
                return Err(JobError::Several {
                    who: found.who.clone(),
                    named: found.named.named.clone(),
                    other: who,
                    other_named: other.named,
                });
            }
        }
    }
    match (found, outside) {
        (Some(found), Some(who)) => Err(JobError::Outside { who, other: found.who }),
        (found, _) => Ok(found.map(|found| Found { outside_image, ..found })),
    }
}

/// Why a file that `process` names by a descriptor of another one is not there after a restore, if that
/// one is not dumped. Where `process` itself is not, that is what is wrong.
fn held_outside_image(
    all: &[Process],
    process: ProcessId,
    named: &Named,
    init: ProcessId,
) -> Option<Unusable> {
    let Way::Descriptor { process: holder, .. } = named.way else { return None };
    let holder = all.iter().find(|one| one.id == holder && one.id != process)?;
    if descends(all, holder, init.pid) {
        return None;
    }
    let reason = format!(
        "is held by {}, which was started in the container by exec and does not descend from its first \
         process; CRIU dumps only what does, so a restore would lack it: have the holder started in the \
         background by a process that ends, whereupon it becomes the first one's, or name a file of the \
         container's own file system",
        who(holder)
    );
    Some(Unusable { named: named.named.clone(), reason })
}

/// All of `cuda` are, still, in the job that was found first, or in none if none was; or it is an
/// error.
pub fn confirm(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    entry: &Entry,
) -> Result<(), JobError> {
    let found = find(driver, processes, cuda, entry.init)?;
    match (found, entry.in_job()) {
        (Some(found), Some(job)) if found.job.file != job.file => Err(JobError::NotTheImages(
            format!("{}: its job file {} was replaced meanwhile", found.who, found.named.named),
        )),
        // It matters to CRIU only.
        (Some(found), Some(_)) if entry.stage != Stage::Freeing => found.require_holders(),
        // The others have ended.
        (Some(found), None) => Err(JobError::NotTheImages(format!(
            "{}: it began meanwhile, in a job that the others were not in",
            found.who
        ))),
        // It was found by what another process says, which is not there any more.
        (None, Some(_)) if cuda.iter().any(|process| !processes.ending(process.process.id)) => {
            Err(JobError::NotTheImages(
                "no process of the container names the job file any more that was found first"
                    .into(),
            ))
        }
        _ => Ok(()),
    }
}

impl Found {
    /// Refuses a file that a restored process would not find by its name.
    fn require_holders(&self) -> Result<(), JobError> {
        match self.outside_image.clone() {
            Some((who, why)) => Err(JobError::Unusable { who, why }),
            None => Ok(()),
        }
    }

    /// Where a restored container is to have the file from. `made` is the file that this container was
    /// given, if it was.
    pub fn origin(
        &self,
        made: Option<Identity>,
        spec: &Spec,
        mountinfo: &str,
    ) -> Result<JobFile, JobError> {
        self.require_holders()?;
        if made == Some(self.job.file) {
            return Ok(JobFile::Made);
        }
        let Some(path) = &self.named.path else { return Ok(JobFile::Dumped) };
        match spec::lies_on(spec, mountinfo, path) {
            spec::LiesOn::OwnTmpfs => Ok(JobFile::Dumped),
            spec::LiesOn::Rootfs => {
                let Named { mode, uid, gid, .. } = self.named;
                if mode > 0o777 {
                    let named = self.named.named.clone();
                    let reason =
                        format!("has the mode {mode:04o}: no set-id or sticky bits, please");
                    let why = Unusable { named, reason };
                    return Err(JobError::Unusable { who: self.who.clone(), why });
                }
                Ok(JobFile::Rootfs { path: path.clone(), mode, uid, gid })
            }
            spec::LiesOn::Outside => {
                Err(JobError::OnVolume { who: self.who.clone(), path: path.clone() })
            }
        }
    }
}

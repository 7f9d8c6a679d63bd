//! Jobs: processes that are checkpointed together because they share memory.
//!
//! A process whose environment names a job file at `cuInit` is a member, from driver
//! 590 on; from 610 on its imports come back. What is in the real driver's file is not
//! published. This one is made up, and strict in all that NVIDIA's text asks for, so
//! that tests fail where a careless user of the real file would lose his memory:
//!
//! - The file changes at each checkpoint of a member, which remembers what it wrote.
//! - Callers name the same live file as the member does, and one operation is under
//!   way in a job at a time.
//! - Members are restored in the order of their checkpoints, each from a file that has
//!   its last record, once.
//! - A job begins on the machine where its file was made. (It may be restored elsewhere.)
//!
//! ```text
//! 64 bytes    magic, id of the job, id of the machine, number of checkpoints so far
//! 255 × 64    records: state, pid, number of the checkpoint, nonce
//! ```
//! All numbers are little-endian; what is not used is zero. The size never changes.
//!
//! Every error here is assumed: no driver that has jobs could be tried.
//!
//! | error | when |
//! |---|---|
//! | 304 | the file cannot be opened, or (after `cuInit`) is no job file |
//! | 1 | `cuInit` with another file or another machine's; the caller names no file or another one; the file is of another job, was taken too early, or has been used; it is another member's turn |
//! | 999 | another operation is under way |

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::cuda_error::{CudaError, Result};
use crate::settings::Settings;
use crate::store;

/// The variable that names the job file of a process.
pub(crate) const VARIABLE: &str = "CUDA_CHECKPOINT_JOB_FILE";

/// The first branch of the driver that knows jobs.
pub(crate) const JOBS: u32 = 590;

/// The first branch that keeps imported memory in a job.
const IPC: u32 = 610;

const MAGIC: &[u8; 8] = b"EMUJOB01";

/// Bytes of the header and of each record.
const UNIT: usize = 64;
const RECORDS: usize = 255;
const SIZE: usize = UNIT * (1 + RECORDS);

/// Where things are in the header.
const ID: usize = 8;
const MACHINE: usize = 24;
const SEQUENCE: usize = 40;

/// Whether imported memory comes back after a checkpoint in a job.
pub(crate) fn keeps_imports(settings: &Settings) -> bool {
    settings.branch() >= IPC
}

/// Makes a new job file out of an empty one.
pub(crate) fn initialise(file: &File) -> Result<()> {
    let mut content = vec![0; SIZE];
    content[..MAGIC.len()].copy_from_slice(MAGIC);
    content[ID..ID + 16].copy_from_slice(&store::random()?.to_le_bytes());
    content[MACHINE..MACHINE + 16].copy_from_slice(&store::machine()?.to_le_bytes());
    Ok(file.write_all_at(&content, 0)?)
}

/// The file that a caller names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    device: u64,
    inode: u64,
}

impl Caller {
    fn of(metadata: &fs::Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }

    /// One word, for a request.
    pub(crate) fn to_word(self) -> String {
        format!("{}:{}", self.device, self.inode)
    }

    /// What [`Caller::to_word`] wrote.
    pub(crate) fn from_word(word: &str) -> Option<Self> {
        let (device, inode) = word.split_once(':')?;
        Some(Self { device: device.parse().ok()?, inode: inode.parse().ok()? })
    }
}

/// A process's place in a job. It holds no descriptor: the file is opened anew by its
/// name for each operation, and after a CRIU restore that is what was put there.
#[derive(Debug)]
pub(crate) struct Membership {
    path: PathBuf,
    id: u128,
}

impl Membership {
    /// Joins the job that the environment names, if it names one and the driver knows jobs.
    pub(crate) fn join(settings: &Settings) -> Result<Option<Self>> {
        match std::env::var_os(VARIABLE) {
            Some(path) if settings.branch() >= JOBS => Self::join_file(path.into()).map(Some),
            _ => Ok(None),
        }
    }

    fn join_file(path: PathBuf) -> Result<Self> {
        let content = read(&open(&path)?)?.ok_or(CudaError::INVALID_VALUE)?;
        // After a checkpoint the job may have come from elsewhere; callers and new members
        // of it join as well.
        let begins = content[SEQUENCE..SEQUENCE + 8] == [0; 8];
        if begins && number(&content, MACHINE) != store::machine()? {
            return Err(CudaError::INVALID_VALUE);
        }
        Ok(Self { id: number(&content, ID), path })
    }

    /// This process as a caller.
    pub(crate) fn caller(&self) -> Result<Caller> {
        Ok(Caller::of(&fs::metadata(&self.path)?))
    }

    /// Begins an operation on this member.
    pub(crate) fn begin(&self, caller: Option<Caller>) -> Result<Operation> {
        let caller = caller.ok_or(CudaError::INVALID_VALUE)?;
        let file = open(&self.path)?;
        if Caller::of(&file.metadata()?) != caller {
            return Err(CudaError::INVALID_VALUE);
        }
        let file =
            Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| CudaError::UNKNOWN)?;
        let content = read(&file)?.ok_or(CudaError::OPERATING_SYSTEM)?;
        if number(&content, ID) != self.id {
            return Err(CudaError::INVALID_VALUE);
        }
        Ok(Operation { file, content })
    }
}

/// What a member remembers of its last checkpoint, in memory that CRIU saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    nonce: u128,
    sequence: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free = 0,
    Checkpointed = 1,
    Restored = 2,
}

/// An operation under way: nobody else can begin one in this job.
#[derive(Debug)]
pub(crate) struct Operation {
    file: Flock<File>,
    content: Vec<u8>,
}

impl Operation {
    /// Records a checkpoint; `last` is what the member remembers of an earlier one.
    pub(crate) fn record(&mut self, last: Option<Ticket>) -> Result<Ticket> {
        let first = |used: Use| (0..RECORDS).find(|slot| self.usage(*slot) == used);
        let own =
            last.and_then(|last| self.find(last)).filter(|slot| self.usage(*slot) != Use::Free);
        let slot = own.or_else(|| first(Use::Free)).or_else(|| first(Use::Restored));
        let slot = slot.ok_or(CudaError::UNKNOWN)?;
        let sequence = self.sequence(0) + 1;
        let ticket = Ticket { nonce: store::random()?, sequence };
        self.put(SEQUENCE, &sequence.to_le_bytes())?;
        let mut record = [0; UNIT];
        record[0] = Use::Checkpointed as u8;
        record[4..8].copy_from_slice(&std::process::id().to_le_bytes());
        record[8..16].copy_from_slice(&sequence.to_le_bytes());
        record[16..32].copy_from_slice(&ticket.nonce.to_le_bytes());
        self.put(UNIT * (1 + slot), &record)?;
        Ok(ticket)
    }

    /// Whether the member that remembers this may be restored now.
    pub(crate) fn admit(&self, ticket: Option<Ticket>) -> Result<()> {
        let ticket = ticket.ok_or(CudaError::INVALID_VALUE)?;
        let slot = self.find(ticket).ok_or(CudaError::INVALID_VALUE)?;
        let waits = |slot: usize| self.usage(slot) == Use::Checkpointed;
        let earlier = |slot: usize| waits(slot) && self.sequence(slot + 1) < ticket.sequence;
        if !waits(slot) || (0..RECORDS).any(earlier) {
            return Err(CudaError::INVALID_VALUE);
        }
        Ok(())
    }

    /// Notes that the member is restored: this file will not do so again.
    pub(crate) fn consume(&mut self, ticket: Option<Ticket>) -> Result<()> {
        let slot = ticket.and_then(|ticket| self.find(ticket)).ok_or(CudaError::INVALID_VALUE)?;
        self.put(UNIT * (1 + slot), &[Use::Restored as u8])
    }

    fn find(&self, ticket: Ticket) -> Option<usize> {
        (0..RECORDS).find(|slot| number(&self.content, UNIT * (1 + slot) + 16) == ticket.nonce)
    }

    fn usage(&self, slot: usize) -> Use {
        match self.content[UNIT * (1 + slot)] {
            0 => Use::Free,
            1 => Use::Checkpointed,
            _ => Use::Restored,
        }
    }

    /// Of the header (unit 0) or of a record (from unit 1).
    fn sequence(&self, unit: usize) -> u64 {
        let at = if unit == 0 { SEQUENCE } else { UNIT * unit + 8 };
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.content[at..at + 8]);
        u64::from_le_bytes(bytes)
    }

    fn put(&mut self, at: usize, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, at as u64)?;
        self.content[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

fn number(content: &[u8], at: usize) -> u128 {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&content[at..at + 16]);
    u128::from_le_bytes(bytes)
}

/// Opens what may be anything, without waiting for whoever is at a FIFO's other end.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)
}

/// The content, if this is a job file.
fn read(file: &File) -> io::Result<Option<Vec<u8>>> {
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() != SIZE as u64 {
        return Ok(None);
    }
    let mut content = vec![0; SIZE];
    file.read_exact_at(&mut content, 0)?;
    Ok(content.starts_with(MAGIC).then_some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job without a store behind it.
    struct Job {
        dir: tempfile::TempDir,
        member: Membership,
    }

    impl Job {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("job");
            let mut content = vec![0; SIZE];
            content[..8].copy_from_slice(MAGIC);
            content[ID] = 7;
            fs::write(&path, content).unwrap();
            Self { dir, member: Membership { path, id: 7 } }
        }

        fn begin(&self) -> Result<Operation> {
            self.member.begin(Some(self.member.caller()?))
        }

        fn content(&self) -> Vec<u8> {
            fs::read(&self.member.path).unwrap()
        }

        fn put(&self, content: &[u8]) {
            fs::write(&self.member.path, content).unwrap();
        }
    }

    #[test]
    fn one_operation_at_a_time() {
        let job = Job::new();
        let operation = job.begin().unwrap();
        assert_eq!(job.begin().unwrap_err(), CudaError::UNKNOWN);
        drop(operation);
        assert!(job.begin().is_ok());
    }

    #[test]
    fn the_caller_names_the_same_file() {
        let job = Job::new();
        assert_eq!(job.member.begin(None).unwrap_err(), CudaError::INVALID_VALUE);
        let copy = job.dir.path().join("copy");
        fs::copy(&job.member.path, &copy).unwrap();
        let other = Membership { path: copy, id: 7 }.caller().unwrap();
        assert_eq!(job.member.begin(Some(other)).unwrap_err(), CudaError::INVALID_VALUE);
        assert_eq!(Caller::from_word(&other.to_word()), Some(other));
    }

    #[test]
    fn members_come_back_in_order_and_once() {
        let job = Job::new();
        let fresh = job.content();
        let one = job.begin().unwrap().record(None).unwrap();
        let early = job.content();
        let two = job.begin().unwrap().record(None).unwrap();
        let saved = job.content();
        assert!(fresh != early && early != saved);

        for _ in 0..2 {
            // A working copy of the saved file, each time.
            job.put(&saved);
            assert_eq!(job.begin().unwrap().admit(Some(two)), Err(CudaError::INVALID_VALUE));
            for ticket in [one, two] {
                let mut operation = job.begin().unwrap();
                operation.admit(Some(ticket)).unwrap();
                operation.consume(Some(ticket)).unwrap();
            }
        }
        let refused = |content: &[u8], ticket| {
            job.put(content);
            assert_eq!(job.begin().unwrap().admit(Some(ticket)), Err(CudaError::INVALID_VALUE));
        };
        let used = job.content();
        refused(&used, one);
        refused(&early, two);
        refused(&fresh, one);
        let mut unknown = saved.clone();
        unknown[ID] = 8;
        job.put(&unknown);
        assert_eq!(job.begin().unwrap_err(), CudaError::INVALID_VALUE);
        for broken in [&saved[..100], b"", &[0; SIZE]] {
            job.put(broken);
            assert_eq!(job.begin().unwrap_err(), CudaError::OPERATING_SYSTEM);
        }
    }

    #[test]
    fn records_are_used_again() {
        let job = Job::new();
        let mut last = None;
        for _ in 0..2 * RECORDS {
            let mut operation = job.begin().unwrap();
            let ticket = operation.record(last).unwrap();
            operation.admit(Some(ticket)).unwrap();
            operation.consume(Some(ticket)).unwrap();
            last = Some(ticket);
        }
        // Members that ended leave theirs to others.
        for _ in 0..2 * RECORDS {
            let mut operation = job.begin().unwrap();
            let ticket = operation.record(None).unwrap();
            operation.consume(Some(ticket)).unwrap();
        }
    }
}

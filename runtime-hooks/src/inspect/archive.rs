//! An image in an archive, as `podman container checkpoint --export` writes it: a tar file in which
//! `checkpoint/` is the image, and the container's configuration lies beside it.
//!
//! It is read once, from front to back, and nothing of it is written anywhere. Kept in memory are the
//! manifest, the copy of the job file and Podman's note of the container, each up to the size that it
//! may have; of everything else only the size.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use stasis_config::manifest::{JOB_FILE, MANIFEST_FILE, MAX_BYTES, MAX_JOB_BYTES};
use stasis_config::text::printable;
use stasis_config::{Manifest, ManifestError};
use tar::{Archive as Tar, Entry};

use super::compression::{self, Compression};
use super::source::{List, Source, Unfit, Usage};
use crate::image;

/// The image in the archive.
const IMAGE: &str = "checkpoint/";
/// Podman's note of the container, and its specification; an import needs both.
const CONFIG: &str = "config.dump";
const SPEC: &str = "spec.dump";

/// Entries at most.
const MAX_ENTRIES: u64 = 1 << 20;
/// What all may have at most: all the memory of a large machine and its GPUs, some times.
const MAX_TOTAL: u64 = 1 << 44;
/// What an entry's headers may have at most; those that extend others are read into memory.
const MAX_HEADERS: u64 = 1 << 20;
/// What is read of Podman's note at most.
const MAX_CONFIG: u64 = 4 << 20;
/// What is read from the file at once.
const BUFFER: usize = 1 << 17;
/// Names in errors.
const LONGEST: usize = 200;

/// What Podman says of the container in an archive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exported {
    /// The id.
    #[serde(default)]
    pub id: Option<String>,
    /// The name.
    #[serde(default)]
    pub name: Option<String>,
    /// The image that its root file system is of.
    #[serde(default, rename(deserialize = "rootfsImageName"))]
    pub image: Option<String>,
}

/// An archive that was read.
pub(super) struct Archive {
    path: PathBuf,
    compression: Compression,
    bytes_on_disk: u64,
    seen: Seen,
}

/// What was found in it.
#[derive(Default)]
struct Seen {
    entries: u64,
    total: u64,
    /// Of the image.
    files: u64,
    lists: BTreeMap<&'static str, Result<bool, Unfit>>,
    manifest: Option<Found>,
    job: Option<Found>,
    config: Option<Found>,
    has_spec: bool,
}

/// The beginning of a regular file, or that there is something else.
type Found = Result<Vec<u8>, Unfit>;

/// Why an archive is not looked at.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It is something else.
    #[error("it is no archive of `podman container checkpoint --export`: {0}")]
    NotPodmans(String),
    /// Its end is not there.
    #[error("the archive is cut short")]
    CutShort,
    /// There is more to it than this program reads.
    #[error("it is compressed with {0}, which is not read")]
    Compressed(&'static str),
    /// The file, or what is compressed in it, cannot be read.
    #[error("it cannot be read")]
    Read(#[from] io::Error),
}

/// How far an archive was read: bytes of the file, and all that it has.
pub type Watch<'a> = &'a dyn Fn(u64, u64);

impl Archive {
    /// Reads an archive.
    pub(super) fn read(path: &Path, file: File, watch: Watch<'_>) -> Result<Self, ArchiveError> {
        let metadata = file.metadata()?;
        let mut file = Watched { file, position: 0, length: metadata.len(), watch };
        let mut first = [0; 6];
        let length = read_up_to(&mut file, &mut first)?;
        file.seek(SeekFrom::Start(0))?;
        let compression = Compression::of(&first[..length]).map_err(ArchiveError::Compressed)?;
        let seen = match compression {
            // What is not looked at is not read.
            Compression::None => walk_seeking(BufReader::with_capacity(BUFFER, file))?,
            Compression::Gzip => walk(compression::gzip(BufReader::with_capacity(BUFFER, file)))?,
            Compression::Zstd => {
                walk(compression::Zstd::new(BufReader::with_capacity(BUFFER, file)))?
            }
        };
        if seen.files == 0 {
            return Err(not_podmans("there is no checkpoint/ in it"));
        }
        let bytes_on_disk = metadata.blocks().saturating_mul(512);
        Ok(Self { path: path.to_owned(), compression, bytes_on_disk, seen })
    }

    /// How it is compressed.
    pub(super) fn compression(&self) -> Compression {
        self.compression
    }

    /// What Podman says of the container; none if it says nothing that can be read.
    pub(super) fn exported(&self) -> Option<Exported> {
        let bytes = self.seen.config.as_ref()?.as_ref().ok()?;
        serde_json::from_slice(bytes).ok()
    }

    fn manifest_path(&self) -> PathBuf {
        self.path.join(IMAGE).join(MANIFEST_FILE)
    }
}

impl Source for Archive {
    fn list(&self, list: List) -> Result<(), Unfit> {
        match self.seen.lists.get(list.name()) {
            Some(Ok(_)) => Ok(()),
            Some(Err(unfit)) => Err(unfit.again()),
            None => Err(Unfit::Missing),
        }
    }

    fn names(&self, list: List) -> bool {
        matches!(self.seen.lists.get(list.name()), Some(Ok(true)))
    }

    fn has_manifest(&self) -> bool {
        self.seen.manifest.is_some()
    }

    fn manifest(&self) -> Result<Option<Manifest>, ManifestError> {
        let path = self.manifest_path();
        match &self.seen.manifest {
            None => Ok(None),
            Some(Ok(bytes)) => Manifest::parse(bytes, path).map(Some),
            Some(Err(_)) => Err(ManifestError::NotRegular { path, kind: "something else" }),
        }
    }

    fn job(&self, most: u64) -> Found {
        match &self.seen.job {
            None => Err(Unfit::Missing),
            Some(Err(unfit)) => Err(unfit.again()),
            Some(Ok(bytes)) => {
                let most = usize::try_from(most.saturating_add(1)).unwrap_or(usize::MAX);
                Ok(bytes[..bytes.len().min(most)].to_vec())
            }
        }
    }

    fn usage(&self) -> (Usage, Option<String>) {
        (Usage { bytes: self.bytes_on_disk, files: self.seen.files }, None)
    }

    fn problems(&self) -> Vec<String> {
        let import = "so Podman cannot import it";
        let mut problems = Vec::new();
        match &self.seen.config {
            None => problems.push(format!("{CONFIG} is not in it, {import}")),
            Some(_) if self.exported().is_none() => {
                problems.push(format!("{CONFIG} cannot be read, {import}"));
            }
            Some(_) => {}
        }
        if !self.seen.has_spec {
            problems.push(format!("{SPEC} is not in it, {import}"));
        }
        problems
    }
}

impl Unfit {
    fn again(&self) -> Self {
        match self {
            Self::Missing => Self::Missing,
            Self::NotRegular => Self::NotRegular,
            Self::TooLarge(bytes) => Self::TooLarge(*bytes),
            Self::Unreadable(error) => {
                Self::Unreadable(io::Error::new(error.kind(), error.to_string()))
            }
        }
    }
}

fn not_podmans(why: &str) -> ArchiveError {
    ArchiveError::NotPodmans(printable(why, 2 * LONGEST))
}

impl Seen {
    /// Takes from an entry what is needed of it.
    fn add(&mut self, entry: &mut Entry<'_, impl Read>) -> Result<(), ArchiveError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(not_podmans(&format!("it has more than {MAX_ENTRIES} entries")));
        }
        if entry.header().entry_type().is_gnu_sparse() {
            return Err(not_podmans("it has a sparse file"));
        }
        self.total = self.total.saturating_add(entry.size());
        if self.total > MAX_TOTAL {
            return Err(not_podmans(&format!("its entries have more than {MAX_TOTAL} bytes")));
        }
        let name = name(&entry.path_bytes())?;
        let is_directory = entry.header().entry_type().is_dir();
        if let Some(file) = name.strip_prefix(IMAGE)
            && !file.is_empty()
            && !is_directory
        {
            self.files += 1;
        }
        let twice = || not_podmans(&format!("{} is in it twice", printable(&name, LONGEST)));
        for list in List::ALL {
            if name.strip_prefix(IMAGE) == Some(list.name()) {
                let searched = search(entry, list);
                if self.lists.insert(list.name(), searched).is_some() {
                    return Err(twice());
                }
            }
        }
        let (kept, max) = match name.as_str() {
            CONFIG => (&mut self.config, MAX_CONFIG),
            SPEC if std::mem::replace(&mut self.has_spec, true) => return Err(twice()),
            name => match name.strip_prefix(IMAGE) {
                Some(MANIFEST_FILE) => (&mut self.manifest, MAX_BYTES),
                Some(JOB_FILE) => (&mut self.job, MAX_JOB_BYTES),
                _ => return Ok(()),
            },
        };
        if kept.is_some() {
            return Err(twice());
        }
        *kept = Some(keep(entry, max)?);
        Ok(())
    }
}

/// The name of an entry, from the top of the archive. Nothing is written under it, but an archive
/// in which one leads elsewhere is none of Podman's.
fn name(bytes: &[u8]) -> Result<String, ArchiveError> {
    let whole = String::from_utf8_lossy(bytes);
    let odd = |what: &str| {
        Err(not_podmans(&format!("it has the name {}, {what}", printable(&whole, LONGEST))))
    };
    if whole.starts_with('/') {
        return odd("which begins at the root");
    }
    if whole.split('/').any(|part| part == "..") {
        return odd("which leads out of it");
    }
    let parts: Vec<_> = whole.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    Ok(parts.join("/"))
}

/// The beginning of a file: up to `max` bytes, and one more of one that is longer.
fn keep(entry: &mut Entry<'_, impl Read>, max: u64) -> io::Result<Found> {
    if !is_regular(entry) {
        return Ok(Err(Unfit::NotRegular));
    }
    let mut bytes = Vec::new();
    entry.take(max + 1).read_to_end(&mut bytes)?;
    Ok(Ok(bytes))
}

fn search(entry: &mut Entry<'_, impl Read>, list: List) -> Result<bool, Unfit> {
    if !is_regular(entry) {
        return Err(Unfit::NotRegular);
    }
    if entry.size() > list.max() {
        return Err(Unfit::TooLarge(entry.size()));
    }
    image::contains(entry, list.needle()).map_err(Unfit::Unreadable)
}

fn is_regular(entry: &Entry<'_, impl Read>) -> bool {
    entry.header().entry_type().is_file()
}

/// Reads a stream from front to back, to its very end: there the compressions have their checksums.
fn walk(stream: impl Read) -> Result<Seen, ArchiveError> {
    let (left, ended) = (Cell::new(0), Cell::new(false));
    let mut tar = Tar::new(Bounded { inner: stream, left: &left, ended: &ended });
    left.set(MAX_HEADERS);
    let seen = each(tar.entries()?, &left, &ended, true)?;
    left.set(MAX_HEADERS);
    io::copy(&mut tar.into_inner(), &mut io::sink()).map_err(|error| unreadable(&error, &ended))?;
    Ok(seen)
}

/// The same for a file in which one can go forward.
fn walk_seeking(file: impl Read + Seek) -> Result<Seen, ArchiveError> {
    let (left, ended) = (Cell::new(0), Cell::new(false));
    let mut tar = Tar::new(Bounded { inner: file, left: &left, ended: &ended });
    each(tar.entries_with_seek()?, &left, &ended, false)
}

fn each<R: Read>(
    mut entries: tar::Entries<'_, R>,
    left: &Cell<u64>,
    ended: &Cell<bool>,
    to_the_end: bool,
) -> Result<Seen, ArchiveError> {
    let mut seen = Seen::default();
    loop {
        left.set(MAX_HEADERS);
        let entry = entries.next().transpose();
        left.set(u64::MAX);
        let mut entry = match entry {
            Ok(Some(entry)) => entry,
            // Two empty blocks mark the end of a whole one.
            Ok(None) if !ended.get() => return Ok(seen),
            Ok(None) if seen.entries == 0 => return Err(not_podmans("it is empty")),
            Ok(None) => return Err(ArchiveError::CutShort),
            Err(error) if seen.entries == 0 => return Err(not_podmans(&error.to_string())),
            Err(error) => return Err(unreadable(&error, ended)),
        };
        match seen.add(&mut entry) {
            Ok(()) => {}
            Err(ArchiveError::Read(error)) => return Err(unreadable(&error, ended)),
            Err(error) => return Err(error),
        }
        if to_the_end {
            io::copy(&mut entry, &mut io::sink()).map_err(|error| unreadable(&error, ended))?;
        }
    }
}

fn unreadable(error: &io::Error, ended: &Cell<bool>) -> ArchiveError {
    if ended.get() || error.kind() == io::ErrorKind::UnexpectedEof {
        ArchiveError::CutShort
    } else {
        // It may quote the archive.
        let said = printable(&error.to_string(), 2 * LONGEST);
        ArchiveError::Read(io::Error::new(error.kind(), said))
    }
}

/// Lets no more be read than is left, and notes when there was no more.
struct Bounded<'a, R> {
    inner: R,
    left: &'a Cell<u64>,
    ended: &'a Cell<bool>,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other(format!("a header has more than {MAX_HEADERS} bytes")));
        }
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let length = self.inner.read(&mut buffer[..most])?;
        self.left.set(left - length as u64);
        if length == 0 {
            self.ended.set(true);
        }
        Ok(length)
    }
}

impl<R: Seek> Seek for Bounded<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

/// Tells how far the file was read.
struct Watched<'a> {
    file: File,
    position: u64,
    length: u64,
    watch: Watch<'a>,
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.file.read(buffer)?;
        self.position = self.position.saturating_add(length as u64);
        (self.watch)(self.position.min(self.length), self.length);
        Ok(length)
    }
}

impl Seek for Watched<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.position = self.file.seek(to)?;
        Ok(self.position)
    }
}

fn read_up_to(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read(&mut buffer[length..])? {
            0 => break,
            more => length += more,
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;

    use flate2::write::GzEncoder;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    use tar::{Builder, EntryType, Header};

    use super::super::read::read;
    use super::super::{Form, JobCopy, Kind, Report};
    use super::*;
    use crate::error::chain;

    const NOTE: &[u8] = br#"{"id":"8f2c","name":"c1","rootfsImageName":"localhost/i:1","x":1}"#;

    fn manifest(job: Option<&[u8]>) -> Vec<u8> {
        let directory = tempfile::tempdir().unwrap();
        let job = job.map(|content| stasis_config::manifest::Job {
            bytes: content.len() as u64,
            sha256: crate::cuda::digest(content),
            ..Default::default()
        });
        let manifest = Manifest {
            version: stasis_config::manifest::VERSION,
            created: "2026-11-30T04:05:06Z".into(),
            created_by: "stasis-runc 0.1.0".into(),
            container: "c1".into(),
            job,
            ..Manifest::default()
        };
        manifest.write(directory.path()).unwrap();
        fs::read(directory.path().join(MANIFEST_FILE)).unwrap()
    }

    /// An archive that is being made.
    struct Made(Builder<Vec<u8>>);

    impl Made {
        fn new() -> Self {
            Self(Builder::new(Vec::new()))
        }

        fn entry(mut self, name: &str, kind: EntryType, content: &[u8]) -> Self {
            let mut header = Header::new_ustar();
            // As it is, also where the library would not write it.
            header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(kind);
            header.set_mode(0o600);
            header.set_size(content.len() as u64);
            if kind.is_symlink() {
                header.set_link_name("/etc/passwd").unwrap();
            }
            header.set_cksum();
            self.0.append(&header, content).unwrap();
            self
        }

        fn file(self, name: &str, content: &[u8]) -> Self {
            self.entry(name, EntryType::Regular, content)
        }

        /// What Podman writes beside the image.
        fn of_podman() -> Self {
            Self::new()
                .entry("checkpoint/", EntryType::Directory, b"")
                .file("checkpoint/files.img", b"/usr/lib/libcuda.so.580.159.04")
                .file("checkpoint/inventory.img", b"")
                .file(CONFIG, NOTE)
                .file(SPEC, b"{}")
        }

        fn bytes(self) -> Vec<u8> {
            self.0.into_inner().unwrap()
        }

        fn whole() -> Vec<u8> {
            Self::of_podman()
                .file("checkpoint/stasis.job", b"job")
                .file("checkpoint/stasis.json", &manifest(Some(b"job")))
                .bytes()
        }
    }

    fn gzipped(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        compress_to_vec(bytes, CompressionLevel::Fastest)
    }

    fn of(bytes: &[u8]) -> Result<Report, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        let last = Cell::new(0);
        let watch = |position, length| {
            assert!(position >= last.get() && position <= length);
            last.set(position);
        };
        read(file.path(), &watch).map_err(|error| {
            let said = chain(&error);
            assert!(!said.contains(char::is_control), "{said:?}");
            said
        })
    }

    fn refused(bytes: &[u8], says: &str) {
        let said = of(bytes).unwrap_err();
        assert!(said.contains(says), "{said:?} does not say {says:?}");
    }

    #[test]
    fn an_archive_is_read_in_each_compression() {
        let tar = Made::whole();
        for (bytes, compression) in [
            (tar.clone(), Compression::None),
            (gzipped(&tar), Compression::Gzip),
            (zstd(&tar), Compression::Zstd),
        ] {
            let report = of(&bytes).unwrap();
            assert!(report.is_whole(), "{report:?}");
            assert_eq!((report.kind, report.form), (Kind::Cuda, Form::Archive));
            assert_eq!(report.compression, Some(compression));
            assert_eq!(report.files, 4);
            let exported = report.exported.unwrap();
            assert_eq!(exported.id.as_deref(), Some("8f2c"));
            assert_eq!(exported.name.as_deref(), Some("c1"));
            assert_eq!(exported.image.as_deref(), Some("localhost/i:1"));
            let checkpoint = report.checkpoint.unwrap();
            assert_eq!(checkpoint.job.unwrap().copy, JobCopy::Whole);
        }
    }

    #[test]
    fn frames_and_members_may_follow_each_other() {
        let tar = Made::whole();
        let (front, back) = tar.split_at(1000);
        assert!(of(&[gzipped(front), gzipped(back)].concat()).unwrap().is_whole());
        let skipped = [&[0x51, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"any"].concat();
        let frames = [skipped.clone(), zstd(front), skipped, zstd(back)].concat();
        assert!(of(&frames).unwrap().is_whole());
    }

    #[test]
    fn what_is_wrong_with_the_image_stands_in_the_report() {
        let with = |made: Made| of(&made.bytes()).unwrap();
        let report = with(Made::of_podman());
        assert_eq!(report.kind, Kind::Unfinished);
        let report = with(Made::of_podman().file("checkpoint/stasis.json", b"{}"));
        assert_eq!(report.kind, Kind::Unreadable);
        assert!(report.problems[0].contains("/checkpoint/stasis.json"), "{report:?}");
        let too_long = vec![b' '; usize::try_from(MAX_BYTES).unwrap() + 1];
        let report = with(Made::of_podman().file("checkpoint/stasis.json", &too_long));
        assert!(report.problems[0].contains("has more than"), "{report:?}");
        for (content, want) in [
            (Some(&b"jo"[..]), JobCopy::WrongSize),
            (Some(b"jobs"), JobCopy::WrongSize),
            (Some(b"jot"), JobCopy::WrongDigest),
            (None, JobCopy::Missing),
        ] {
            let mut made =
                Made::of_podman().file("checkpoint/stasis.json", &manifest(Some(b"job")));
            if let Some(content) = content {
                made = made.file("checkpoint/stasis.job", content);
            }
            let report = with(made);
            assert!(!report.is_whole());
            assert_eq!(report.checkpoint.unwrap().job.unwrap().copy, want);
        }
        let plain = Made::new().file("checkpoint/inventory.img", b"");
        let report = with(plain);
        assert_eq!((report.kind, report.problems.len()), (Kind::Plain, 2), "{report:?}");
        assert!(report.problems.iter().all(|said| said.contains(".dump is not in it")));
        let report = with(Made::new().file("checkpoint/inventory.img", b"").file(CONFIG, b"[1"));
        assert!(report.problems[0].contains("config.dump cannot be read"), "{report:?}");
    }

    #[test]
    fn what_is_no_regular_file_is_not_followed() {
        for kind in [EntryType::Symlink, EntryType::Link, EntryType::Fifo, EntryType::Char] {
            for name in ["stasis.json", "stasis.job", "inventory.img", "files.img"] {
                let mut made = Made::new().file(CONFIG, NOTE).file(SPEC, b"{}");
                for (file, content) in [
                    ("inventory.img", Vec::new()),
                    ("files.img", Vec::new()),
                    ("stasis.job", b"job".to_vec()),
                    ("stasis.json", manifest(Some(b"job"))),
                ] {
                    let path = format!("checkpoint/{file}");
                    made = if file == name {
                        made.entry(&path, kind, b"")
                    } else {
                        made.file(&path, &content)
                    };
                }
                let report = of(&made.bytes()).unwrap();
                assert_eq!(report.problems.len(), 1, "{report:?}");
                let said = &report.problems[0];
                assert!(said.contains(name) && said.contains("regular file"), "{said}");
            }
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in ["../x", "checkpoint/../../x", "/etc/passwd", "checkpoint/.."] {
            refused(&Made::of_podman().file(name, b"").bytes(), "it has the name ");
        }
        refused(&Made::of_podman().file("/\u{1b}[2J", b"").bytes(), "\\u{1b}[2J");
        // And those that are the same in another way are the same.
        let made = Made::new().file("./checkpoint//./inventory.img", b"");
        assert_eq!(of(&made.bytes()).unwrap().kind, Kind::Plain);
    }

    #[test]
    fn what_is_there_twice_is_refused() {
        for name in [
            "checkpoint/inventory.img",
            "checkpoint/files.img",
            "checkpoint/stasis.json",
            "checkpoint/stasis.job",
            CONFIG,
            SPEC,
        ] {
            let made = Made::of_podman().file(name, b"").file(name, b"");
            refused(&made.bytes(), "is in it twice");
        }
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        for bytes in [&b""[..], b"hello", &[b'x'; 4096], &gzipped(b""), &zstd(b""), &gzipped(b"x")]
        {
            refused(bytes, "it is no archive of `podman container checkpoint --export`");
        }
        refused(&Made::new().file(CONFIG, NOTE).bytes(), "there is no checkpoint/ in it");
        refused(&Made::new().bytes(), "there is no checkpoint/ in it");
        refused(b"BZh91AY&SY", "compressed with bzip2");
        refused(&[0xfd, b'7', b'z', b'X', b'Z', 0, 0], "compressed with xz");
        let mut sparse = Header::new_gnu();
        sparse.set_entry_type(EntryType::GNUSparse);
        sparse.set_path("checkpoint/pages-1.img").unwrap();
        sparse.set_size(0);
        sparse.as_gnu_mut().unwrap().realsize = *b"00000000000\0";
        sparse.set_cksum();
        refused(sparse.as_bytes(), "it has a sparse file");
    }

    #[test]
    fn what_is_cut_short_is_told() {
        let tar = Made::whole();
        let (gzip, zstd) = (gzipped(&tar), zstd(&tar));
        // Between entries, within one, and without the mark at the end.
        for length in [512 * 3, 512 * 4, 512 * 5 + 7, tar.len() - 1024] {
            refused(&tar[..length], "the archive is cut short");
        }
        for length in 6..gzip.len() {
            assert!(of(&gzip[..length]).is_err(), "{length} of {}", gzip.len());
        }
        for length in 4..zstd.len() {
            assert!(of(&zstd[..length]).is_err(), "{length} of {}", zstd.len());
        }
        refused(&gzip[..gzip.len() - 1], "the archive is cut short");
    }

    #[test]
    fn what_was_changed_is_told_by_the_checksums() {
        let mut gzip = gzipped(&Made::whole());
        let at = gzip.len() - 8;
        gzip[at] ^= 1;
        refused(&gzip, "it cannot be read");
        let mut tar = Made::whole();
        tar[512] ^= 1;
        refused(&tar, "");
    }

    /// Whatever is changed in one, it is read or refused: nothing panics or goes on for ever.
    #[test]
    fn any_change_is_survived() {
        let tar = Made::whole();
        let mut refused = 0;
        for whole in [zstd(&tar), gzipped(&tar), tar] {
            for at in (0..whole.len()).step_by(3) {
                for change in [1, 0x80, 0xff] {
                    let mut bytes = whole.clone();
                    bytes[at] ^= change;
                    refused += u32::from(of(&bytes).is_err());
                }
            }
        }
        assert!(refused > 1000, "{refused}");
    }

    /// A header that says that it has a terabyte, in a few kilobytes of gzip.
    #[test]
    fn long_headers_are_not_read_into_memory() {
        for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
            let mut header = Header::new_gnu();
            header.set_path("././@LongLink").unwrap();
            header.set_entry_type(kind);
            header.set_size(1 << 40);
            header.set_cksum();
            let mut bytes = Made::of_podman().bytes();
            bytes.truncate(bytes.len() - 1024);
            bytes.extend_from_slice(header.as_bytes());
            bytes.resize(bytes.len() + (2 << 20), b'a');
            for bytes in [gzipped(&bytes), bytes] {
                refused(&bytes, "a header has more than 1048576 bytes");
            }
        }
    }

    /// As for memory of more than 8 GiB: the size stands in a header of its own.
    #[test]
    fn sizes_in_extended_headers_count() {
        let mut header = Header::new_ustar();
        header.set_path("checkpoint/pages-1.img").unwrap();
        header.set_size(0);
        header.set_cksum();
        let bytes = |content: &[u8]| {
            let size = content.len().to_string();
            let mut builder = Made::of_podman().0;
            builder.append_pax_extensions([("size", size.as_bytes())]).unwrap();
            builder.append(&header, content).unwrap();
            Made(builder).file("checkpoint/stasis.json", &manifest(None)).bytes()
        };
        let tar = bytes(&[1; 5000]);
        for bytes in [gzipped(&tar), tar] {
            assert!(of(&bytes).unwrap().is_whole());
        }
    }

    /// What is not compressed is not read, but for what is needed of it: here 100 GiB of nothing.
    #[test]
    fn pages_are_passed_over() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut header = Header::new_gnu();
        header.set_path("checkpoint/pages-1.img").unwrap();
        header.set_size(100 << 30);
        header.set_cksum();
        let mut writer = file.reopen().unwrap();
        writer.write_all(header.as_bytes()).unwrap();
        writer.seek(SeekFrom::Current(100 << 30)).unwrap();
        writer.write_all(&Made::whole()).unwrap();
        assert!(read(file.path(), &|_, _| ()).unwrap().is_whole());
        // One that ends within them is not taken for whole.
        writer.set_len(1 << 30).unwrap();
        let said = chain(&read(file.path(), &|_, _| ()).unwrap_err());
        assert!(said.ends_with("the archive is cut short"), "{said}");
        // Nor one that says it has more than there can be.
        header.set_size(MAX_TOTAL + 1);
        header.set_cksum();
        refused(header.as_bytes(), "entries have more than");
    }
}

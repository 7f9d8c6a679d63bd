//! A GPU with the kernels loaded.
#![allow(unsafe_code)]

use std::ffi::OsStr;

use crate::PTX;
use crate::ffi::{IpcHandle, Library};
use crate::shared::SharedFlags;

/// A CUDA call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CUDA {call} {code}")]
pub struct Error {
    /// The call, without its version.
    pub call: &'static str,
    /// The `CUresult`.
    pub code: i32,
}

/// The result of a CUDA call.
pub type Result<T> = std::result::Result<T, Error>;

/// A context on one GPU. It must be used on the thread that made it.
pub struct Gpu {
    library: Library,
    kernels: Kernels,
    counter: u64,
}

struct Kernels {
    increment: usize,
    fill: usize,
    verify: usize,
    spin: usize,
    rendezvous: usize,
}

/// Device memory with a pattern in it.
pub struct Pattern {
    address: u64,
    words: u64,
    wrong: u64,
}

/// A counter and a pattern in one allocation, which processes can share.
pub struct Segment {
    address: u64,
    pattern: Pattern,
}

/// Bytes before the pattern of a segment; the counter is the first word.
const SEGMENT_HEAD: usize = 256;

/// The flags as the GPU sees them.
#[derive(Clone, Copy)]
pub struct DeviceFlags(u64);

const SEED: u32 = 0x5741_5349;

impl Gpu {
    /// Loads the driver and makes a context on GPU `ordinal` modulo their number.
    pub fn start(ordinal: usize) -> std::result::Result<Self, anyhow::Error> {
        Self::start_with(Library::load(OsStr::new("libcuda.so.1"))?, ordinal).map_err(Into::into)
    }

    /// The same with a driver that is loaded already.
    pub fn start_with(library: Library, ordinal: usize) -> Result<Self> {
        library.init()?;
        let count = usize::try_from(library.device_count()?).unwrap_or_default().max(1);
        library.create_context(i32::try_from(ordinal % count).unwrap_or_default())?;
        let module = library.load_module(PTX)?;
        let kernels = Kernels {
            increment: library.function(module, c"increment")?,
            fill: library.function(module, c"fill")?,
            verify: library.function(module, c"verify")?,
            spin: library.function(module, c"spin")?,
            rendezvous: library.function(module, c"rendezvous")?,
        };
        let counter = library.global(module, c"counter")?;
        Ok(Self { library, kernels, counter })
    }

    /// Adds one to the counter in device memory, and reads it.
    pub fn increment(&self) -> Result<u32> {
        // SAFETY: one parameter, a pointer to the module's variable.
        unsafe { self.library.launch(self.kernels.increment, 1, 1, &mut [self.counter]) }?;
        self.count()
    }

    /// Reads the counter.
    pub fn count(&self) -> Result<u32> {
        self.word(self.counter)
    }

    fn word(&self, address: u64) -> Result<u32> {
        let mut word = [0; 4];
        self.library.copy_to_host(&mut word, address)?;
        Ok(u32::from_le_bytes(word))
    }

    /// Allocates device memory and fills it with a pattern.
    pub fn pattern(&self, mib: usize) -> Result<Pattern> {
        let bytes = mib << 20;
        let words = bytes as u64 / 4;
        let pattern = Pattern {
            address: self.library.allocate(bytes)?,
            words,
            wrong: self.library.allocate(4)?,
        };
        self.fill(&pattern)?;
        Ok(pattern)
    }

    fn fill(&self, pattern: &Pattern) -> Result<()> {
        let arguments = &mut [pattern.address, pattern.words, SEED.into()];
        // SAFETY: the parameters of the kernel, the pointer with `words` words.
        unsafe { self.library.launch(self.kernels.fill, 256, 256, arguments) }?;
        self.library.synchronize()
    }

    /// Compares all of the pattern; the number of words that differ.
    pub fn mismatches(&self, pattern: &Pattern) -> Result<u32> {
        self.library.set_words(pattern.wrong, 0, 1)?;
        let arguments = &mut [pattern.address, pattern.words, SEED.into(), pattern.wrong];
        // SAFETY: the parameters of the kernel, the pointers with `words` words and one.
        unsafe { self.library.launch(self.kernels.verify, 256, 256, arguments) }?;
        self.word(pattern.wrong)
    }

    /// Damages one word of the pattern, for tests.
    pub fn damage(&self, pattern: &Pattern) -> Result<()> {
        self.library.copy_to_device(pattern.address + 4, &[0; 4])
    }

    /// Launches a kernel that runs for that long, and does not wait for it.
    pub fn launch_spin(&self, milliseconds: u64) -> Result<()> {
        let arguments = &mut [milliseconds * 1_000_000];
        // SAFETY: the parameter of the kernel.
        unsafe { self.library.launch(self.kernels.spin, 1, 1, arguments) }
    }

    /// Waits for all work.
    pub fn synchronize(&self) -> Result<()> {
        self.library.synchronize()
    }

    /// Allocates managed memory and leaves it allocated.
    pub fn allocate_managed(&self, bytes: usize) -> Result<u64> {
        self.library.allocate_managed(bytes)
    }

    /// Allocates device memory without contents.
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        self.library.allocate(bytes)
    }

    /// Frees memory.
    pub fn free(&self, address: u64) -> Result<()> {
        self.library.free(address)
    }

    /// Free and total bytes of the GPU.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.library.memory_info()
    }

    /// Allocates a segment: the counter at 100, then `mib` MiB of pattern.
    pub fn segment(&self, mib: usize) -> Result<Segment> {
        let segment =
            self.place_segment(self.library.allocate(SEGMENT_HEAD + (mib << 20))?, mib)?;
        self.library.set_words(segment.address, 100, 1)?;
        self.fill(&segment.pattern)?;
        Ok(segment)
    }

    /// A handle with which other processes open the segment.
    pub fn export(&self, segment: &Segment) -> Result<IpcHandle> {
        self.library.export(segment.address)
    }

    /// Opens another process's segment.
    pub fn import(&self, handle: IpcHandle, mib: usize) -> Result<Segment> {
        self.place_segment(self.library.import(handle)?, mib)
    }

    /// Closes what `import` has opened.
    pub fn close(&self, segment: &Segment) -> Result<()> {
        self.library.close(segment.address)
    }

    fn place_segment(&self, address: u64, mib: usize) -> Result<Segment> {
        let pattern = Pattern {
            address: address + SEGMENT_HEAD as u64,
            words: (mib << 20) as u64 / 4,
            wrong: self.library.allocate(4)?,
        };
        Ok(Segment { address, pattern })
    }

    /// Adds one to the counter of a segment, by a kernel of this process.
    pub fn increment_in(&self, segment: &Segment) -> Result<()> {
        // SAFETY: one parameter, a pointer to the first word.
        unsafe { self.library.launch(self.kernels.increment, 1, 1, &mut [segment.address]) }?;
        self.library.synchronize()
    }

    /// The counter of a segment, and how many words of its pattern differ.
    pub fn look_at(&self, segment: &Segment) -> Result<(u32, u32)> {
        Ok((self.word(segment.address)?, self.mismatches(&segment.pattern)?))
    }

    /// Lets the GPU reach flags that processes share.
    pub fn share(&self, flags: &SharedFlags) -> Result<DeviceFlags> {
        // SAFETY: shared flags are never unmapped.
        unsafe { self.library.register(flags.address(), flags.bytes()) }.map(DeviceFlags)
    }

    /// Sets this rank's flag to `step` and waits until all ranks' flags reach it.
    pub fn rendezvous(&self, flags: DeviceFlags, rank: u32, ranks: u32, step: u32) -> Result<()> {
        let mine = flags.0 + 4 * u64::from(rank);
        let arguments = &mut [mine, flags.0, ranks.into(), step.into()];
        // SAFETY: the parameters of the kernel, the pointers into the shared flags.
        unsafe { self.library.launch(self.kernels.rendezvous, 1, 1, arguments) }?;
        self.library.synchronize()
    }
}

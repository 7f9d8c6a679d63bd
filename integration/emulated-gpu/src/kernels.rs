//! The kernels, known by name, and the one stream on which they run.
//!
//! A launch only queues. Whoever launches, synchronises or locks moves the
//! queue on, in order, as far as it goes without waiting.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::cuda_error::Result;
use crate::memory::Memory;

/// Names of the kernels that run here, with the bytes of each parameter.
///
/// | kernel | parameters | what it does |
/// |---|---|---|
/// | `increment` | pointer to u32 | adds 1 |
/// | `fill` | pointer, u64 words, u32 seed | word i becomes i × 2654435761 + seed |
/// | `verify` | pointer, u64 words, u32 seed, pointer to u32 | adds the number of words that differ |
/// | `spin` | u64 nanoseconds | runs that long |
/// | `rendezvous` | pointer to my flag, pointer to the flags, u32 count, u32 step | sets my flag to step, ends when all have reached it |
pub const KERNELS: [(&str, &[usize]); 5] = [
    ("increment", &[8]),
    ("fill", &[8, 8, 4]),
    ("verify", &[8, 8, 4, 8]),
    ("spin", &[8]),
    ("rendezvous", &[8, 8, 4, 4]),
];

/// Words that a pattern kernel handles at a time.
const CHUNK_WORDS: u64 = 1 << 18;

/// A kernel with its arguments.
#[derive(Debug)]
pub(crate) enum Work {
    Increment { pointer: u64 },
    Fill { pointer: u64, words: u64, seed: u32 },
    Verify { pointer: u64, words: u64, seed: u32, result: u64 },
    Spin { duration: Duration },
    Rendezvous { mine: u64, flags: u64, count: u32, step: u32 },
}

impl Work {
    /// Kernel number `kernel` of [`KERNELS`] with one number a parameter.
    pub(crate) fn new(kernel: usize, arguments: &[u64]) -> Option<Self> {
        let word = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap_or_default();
        Some(match (KERNELS.get(kernel)?.0, arguments) {
            ("increment", &[pointer]) => Self::Increment { pointer },
            ("fill", &[pointer, words, seed]) => Self::Fill { pointer, words, seed: word(seed) },
            ("verify", &[pointer, words, seed, result]) => {
                Self::Verify { pointer, words, seed: word(seed), result }
            }
            ("spin", &[nanoseconds]) => Self::Spin { duration: Duration::from_nanos(nanoseconds) },
            ("rendezvous", &[mine, flags, count, step]) => {
                Self::Rendezvous { mine, flags, count: word(count), step: word(step) }
            }
            _ => return None,
        })
    }
}

/// The stream: work in flight, oldest first.
#[derive(Default)]
pub(crate) struct Stream {
    queue: VecDeque<Work>,
    /// When the oldest began, once it has.
    began: Option<Instant>,
}

impl Stream {
    pub(crate) fn launch(&mut self, work: Work, memory: &Memory) -> Result<()> {
        self.queue.push_back(work);
        self.advance(memory).map(|_| ())
    }

    /// Runs what can run; true if nothing is left. An error drops all that was queued.
    pub(crate) fn advance(&mut self, memory: &Memory) -> Result<bool> {
        let mut start = Instant::now();
        while let Some(work) = self.queue.front() {
            let first = self.began.is_none();
            let began = *self.began.get_or_insert(start);
            let end = run(work, began, first, memory).inspect_err(|_| self.queue.clear())?;
            let Some(end) = end else { return Ok(false) };
            start = end;
            self.queue.pop_front();
            self.began = None;
        }
        Ok(true)
    }
}

/// Runs one kernel; when it ended, or nothing if it has not.
fn run(work: &Work, began: Instant, first: bool, memory: &Memory) -> Result<Option<Instant>> {
    match *work {
        Work::Increment { pointer } => {
            memory.set_word(pointer, memory.word(pointer)?.wrapping_add(1))?;
        }
        Work::Fill { pointer, words, seed } => {
            chunks(words, |at, count| memory.write(pointer + at * 4, &pattern(at, count, seed)))?;
        }
        Work::Verify { pointer, words, seed, result } => {
            let mut wrong = 0_u32;
            chunks(words, |at, count| {
                let expected = pattern(at, count, seed);
                let mut found = vec![0; expected.len()];
                memory.read(pointer + at * 4, &mut found)?;
                if found != expected {
                    let pairs = found.chunks_exact(4).zip(expected.chunks_exact(4));
                    wrong += u32::try_from(pairs.filter(|(a, b)| a != b).count()).unwrap_or(1);
                }
                Ok(())
            })?;
            memory.set_word(result, memory.word(result)?.wrapping_add(wrong))?;
        }
        Work::Spin { duration } => {
            let end = began + duration;
            return Ok((Instant::now() >= end).then_some(end));
        }
        Work::Rendezvous { mine, flags, count, step } => {
            if first {
                memory.set_word(mine, step)?;
            }
            for peer in 0..u64::from(count) {
                if memory.word(flags + peer * 4)? < step {
                    return Ok(None);
                }
            }
        }
    }
    Ok(Some(Instant::now()))
}

fn chunks(words: u64, mut each: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
    let mut at = 0;
    while at < words {
        let count = CHUNK_WORDS.min(words - at);
        each(at, count)?;
        at += count;
    }
    Ok(())
}

fn pattern(at: u64, count: u64, seed: u32) -> Vec<u8> {
    let first = u32::try_from(at & 0xffff_ffff).unwrap_or_default();
    let mut word = first.wrapping_mul(2_654_435_761).wrapping_add(seed);
    let mut bytes = vec![0; usize::try_from(count * 4).unwrap_or_default()];
    for place in bytes.chunks_exact_mut(4) {
        place.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(2_654_435_761);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda_error::CudaError;

    fn registered(words: &mut [u32]) -> (Memory, u64) {
        let address = words.as_mut_ptr() as u64;
        let mut memory = Memory::new();
        memory.register(address, 4 * words.len() as u64).unwrap();
        (memory, address)
    }

    #[test]
    fn work_runs_in_order() {
        let mut words = [100_u32; 2];
        let (memory, address) = registered(&mut words);
        let mut stream = Stream::default();
        let spin = Work::Spin { duration: Duration::from_millis(30) };
        let began = Instant::now();
        stream.launch(spin, &memory).unwrap();
        stream.launch(Work::Increment { pointer: address }, &memory).unwrap();
        assert_eq!(memory.word(address), Ok(100), "increment waits for the kernel before it");
        while !stream.advance(&memory).unwrap() {}
        assert!(began.elapsed() >= Duration::from_millis(30));
        assert_eq!(memory.word(address), Ok(101));
    }

    #[test]
    fn rendezvous_waits_for_all() {
        let mut flags = [0_u32; 3];
        let (memory, address) = registered(&mut flags);
        let mut stream = Stream::default();
        let work = Work::Rendezvous { mine: address, flags: address, count: 3, step: 5 };
        stream.launch(work, &memory).unwrap();
        memory.set_word(address + 4, 5).unwrap();
        assert_eq!(stream.advance(&memory), Ok(false));
        memory.set_word(address + 8, 6).unwrap();
        assert_eq!(stream.advance(&memory), Ok(true));
    }

    #[test]
    fn verify_counts_what_differs() {
        let mut words = vec![0_u32; 1001];
        let (memory, address) = registered(&mut words);
        let mut stream = Stream::default();
        let result = address + 4000;
        stream.launch(Work::Fill { pointer: address, words: 1000, seed: 3 }, &memory).unwrap();
        assert_eq!(memory.word(address + 8), Ok(2_u32.wrapping_mul(2_654_435_761) + 3));
        memory.set_word(address + 40, 0).unwrap();
        let verify = Work::Verify { pointer: address, words: 1000, seed: 3, result };
        stream.launch(verify, &memory).unwrap();
        assert_eq!(memory.word(result), Ok(1));
    }

    #[test]
    fn a_bad_pointer_is_an_error() {
        let mut stream = Stream::default();
        let launched = stream.launch(Work::Increment { pointer: 4096 }, &Memory::new());
        assert_eq!(launched, Err(CudaError::INVALID_VALUE));
        assert_eq!(stream.advance(&Memory::new()), Ok(true));
    }
}

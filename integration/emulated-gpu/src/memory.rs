//! What a process has on the GPUs, by address.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use crate::cuda_error::{CudaError, Result};
use crate::ipc::Exported;
use crate::raw::{self, AnonMapping};
use crate::settings::Settings;
use crate::store::{Key, StoreLock};

/// Device addresses are multiples of this, as on the real driver.
const ALIGNMENT: u64 = 2 << 20;

/// Where device addresses begin: far from anything that is mapped in the process.
const BASE: u64 = 0x0100_0000_0000;

/// A range of device memory; the bytes lie in the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    /// Index of the GPU in the machine; a restore may change it, the address stays.
    pub(crate) gpu: u32,
    pub(crate) bytes: u64,
}

/// Memory of another process that this one has opened. It counts as the other's alone.
struct Import {
    from: Exported,
    /// How often it was opened and not closed.
    opened: u32,
}

enum HostRange {
    /// The application's own memory.
    Registered {
        bytes: u64,
    },
    Managed(AnonMapping),
}

impl HostRange {
    fn bytes(&self) -> u64 {
        match self {
            Self::Registered { bytes } => *bytes,
            Self::Managed(mapping) => mapping.bytes().len() as u64,
        }
    }
}

/// All memory that kernels of this process can reach.
pub(crate) struct Memory {
    device: BTreeMap<u64, Allocation>,
    imports: BTreeMap<u64, Import>,
    host: BTreeMap<u64, HostRange>,
    next: u64,
}

/// Where the bytes of an address are.
enum Place {
    Device { file: File, offset: u64 },
    Host,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            device: BTreeMap::new(),
            imports: BTreeMap::new(),
            host: BTreeMap::new(),
            next: BASE,
        }
    }

    /// Allocates device memory on a GPU.
    pub(crate) fn allocate(&mut self, gpu: u32, bytes: u64, settings: &Settings) -> Result<u64> {
        if bytes == 0 {
            return Err(CudaError::INVALID_VALUE);
        }
        let address = self.next;
        let store = StoreLock::take()?;
        store.reserve(gpu, bytes, settings)?;
        store.create(&Key::own()?.entry().memory(gpu, address), bytes)?;
        self.device.insert(address, Allocation { gpu, bytes });
        self.next += bytes.div_ceil(ALIGNMENT) * ALIGNMENT;
        Ok(address)
    }

    /// Names device memory to other processes; the address is that of `allocate`.
    pub(crate) fn export(&self, address: u64) -> Result<Exported> {
        let allocation = self.device.get(&address).ok_or(CudaError::INVALID_VALUE)?;
        let pid = i32::try_from(std::process::id()).map_err(|_| CudaError::UNKNOWN)?;
        Ok(Exported { pid, gpu: allocation.gpu, address, bytes: allocation.bytes })
    }

    /// Makes another process's memory reachable; once more gives the same address.
    ///
    /// Assumed, not measured: that one's own memory is an invalid context (201), and
    /// what is not there an invalid value.
    pub(crate) fn import(&mut self, from: Exported) -> Result<u64> {
        if from.pid.cast_unsigned() == std::process::id() {
            return Err(CudaError::INVALID_CONTEXT);
        }
        if let Some((address, import)) = self.imports.iter_mut().find(|i| i.1.from == from) {
            import.opened += 1;
            return Ok(*address);
        }
        let path = Key::beside(from.pid)?.entry().memory(from.gpu, from.address);
        let there = std::fs::metadata(path).is_ok_and(|file| file.len() == from.bytes);
        if !there {
            return Err(CudaError::INVALID_VALUE);
        }
        let address = self.next;
        self.next += from.bytes.div_ceil(ALIGNMENT) * ALIGNMENT;
        self.imports.insert(address, Import { from, opened: 1 });
        Ok(address)
    }

    /// Undoes one `import`.
    pub(crate) fn close(&mut self, address: u64) -> Result<()> {
        let import = self.imports.get_mut(&address).ok_or(CudaError::INVALID_VALUE)?;
        import.opened -= 1;
        if import.opened == 0 {
            self.imports.remove(&address);
        }
        Ok(())
    }

    /// Whether memory of other processes is open.
    pub(crate) fn has_imports(&self) -> bool {
        !self.imports.is_empty()
    }

    /// Allocates memory that host and GPU share. Where the real driver moves its
    /// pages, here it is simply the host's.
    pub(crate) fn allocate_managed(&mut self, bytes: u64) -> Result<u64> {
        let len = usize::try_from(bytes).ok().filter(|len| *len > 0);
        let mapping = AnonMapping::new(len.ok_or(CudaError::INVALID_VALUE)?)
            .map_err(|_| CudaError::OUT_OF_MEMORY)?;
        let address = mapping.address();
        self.host.insert(address, HostRange::Managed(mapping));
        Ok(address)
    }

    /// Frees what `allocate` or `allocate_managed` gave.
    pub(crate) fn free(&mut self, address: u64) -> Result<()> {
        if let Some(allocation) = self.device.remove(&address) {
            let _store = StoreLock::take()?;
            return Ok(std::fs::remove_file(Key::own()?.entry().memory(allocation.gpu, address))?);
        }
        match self.host.remove(&address) {
            Some(HostRange::Managed(_)) => Ok(()),
            Some(other) => {
                self.host.insert(address, other);
                Err(CudaError::INVALID_VALUE)
            }
            None => Err(CudaError::INVALID_VALUE),
        }
    }

    /// Makes the application's memory reachable for the GPU, at the same address.
    pub(crate) fn register(&mut self, address: u64, bytes: u64) -> Result<()> {
        if address == 0 || bytes == 0 || address.checked_add(bytes).is_none() {
            return Err(CudaError::INVALID_VALUE);
        }
        let before = self.host.range(..address + bytes).next_back();
        if before.is_some_and(|(start, range)| start + range.bytes() > address) {
            return Err(CudaError::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.host.insert(address, HostRange::Registered { bytes });
        Ok(())
    }

    /// Whether the address lies in registered memory.
    pub(crate) fn is_registered(&self, address: u64) -> bool {
        let range = self.host.range(..=address).next_back();
        range.is_some_and(|(start, range)| {
            matches!(range, HostRange::Registered { .. }) && address < start + range.bytes()
        })
    }

    /// Undoes `register`.
    pub(crate) fn unregister(&mut self, address: u64) -> Result<()> {
        match self.host.get(&address) {
            Some(HostRange::Registered { .. }) => {
                self.host.remove(&address);
                Ok(())
            }
            _ => Err(CudaError::HOST_MEMORY_NOT_REGISTERED),
        }
    }

    /// Whether there is managed memory, which cannot be checkpointed.
    pub(crate) fn has_managed(&self) -> bool {
        self.host.values().any(|range| matches!(range, HostRange::Managed(_)))
    }

    /// All device memory, by address.
    pub(crate) fn allocations(&self) -> &BTreeMap<u64, Allocation> {
        &self.device
    }

    /// The memory of GPU `old` is now on GPU `new`.
    pub(crate) fn move_to(&mut self, gpu: impl Fn(u32) -> u32) {
        for allocation in self.device.values_mut() {
            allocation.gpu = gpu(allocation.gpu);
        }
        for import in self.imports.values_mut() {
            import.from.gpu = gpu(import.from.gpu);
        }
    }

    /// Copies from memory that the GPU can reach.
    pub(crate) fn read(&self, address: u64, out: &mut [u8]) -> Result<()> {
        match self.place(address, out.len() as u64)? {
            Place::Device { file, offset } => Ok(file.read_exact_at(out, offset)?),
            Place::Host => {
                raw::read_host(address, out);
                Ok(())
            }
        }
    }

    /// Copies to memory that the GPU can reach.
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> Result<()> {
        match self.place(address, data.len() as u64)? {
            Place::Device { file, offset } => Ok(file.write_all_at(data, offset)?),
            Place::Host => {
                raw::write_host(address, data);
                Ok(())
            }
        }
    }

    /// Reads one word.
    pub(crate) fn word(&self, address: u64) -> Result<u32> {
        if address.is_multiple_of(4) && self.host_range(address, 4) {
            return Ok(raw::load_word(address));
        }
        let mut word = [0; 4];
        self.read(address, &mut word)?;
        Ok(u32::from_ne_bytes(word))
    }

    /// Writes one word.
    pub(crate) fn set_word(&self, address: u64, value: u32) -> Result<()> {
        if address.is_multiple_of(4) && self.host_range(address, 4) {
            raw::store_word(address, value);
            return Ok(());
        }
        self.write(address, &value.to_ne_bytes())
    }

    fn host_range(&self, address: u64, bytes: u64) -> bool {
        let range = self.host.range(..=address).next_back();
        range.is_some_and(|(start, range)| inside(address, bytes, *start, range.bytes()))
    }

    /// Finds the bytes; the key is read again, since the process may have moved.
    fn place(&self, address: u64, bytes: u64) -> Result<Place> {
        if self.host_range(address, bytes) {
            return Ok(Place::Host);
        }
        let own = self.device.range(..=address).next_back();
        let own = own.filter(|(start, range)| inside(address, bytes, **start, range.bytes));
        let import = self.imports.range(..=address).next_back();
        let import = import.filter(|(start, i)| inside(address, bytes, **start, i.from.bytes));
        let (start, path) = match (own, import) {
            (Some((start, range)), _) => (start, Key::own()?.entry().memory(range.gpu, *start)),
            (None, Some((start, Import { from, .. }))) => {
                (start, Key::beside(from.pid)?.entry().memory(from.gpu, from.address))
            }
            (None, None) => return Err(CudaError::INVALID_VALUE),
        };
        // Memory that is gone was lost with the GPU, for instance by a dump without a checkpoint.
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|_| CudaError::ILLEGAL_ADDRESS)?;
        Ok(Place::Device { file, offset: address - start })
    }
}

fn inside(address: u64, bytes: u64, start: u64, len: u64) -> bool {
    address >= start && (address - start).checked_add(bytes).is_some_and(|end| end <= len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_memory_is_the_hosts() {
        let mut words = [0_u32; 8];
        let address = words.as_mut_ptr() as u64;
        let mut memory = Memory::new();
        assert_eq!(memory.set_word(address, 1), Err(CudaError::INVALID_VALUE));
        memory.register(address, 32).unwrap();
        assert_eq!(
            memory.register(address + 16, 4),
            Err(CudaError::HOST_MEMORY_ALREADY_REGISTERED)
        );
        memory.set_word(address + 4, 7).unwrap();
        assert_eq!(memory.word(address + 4), Ok(7));
        assert_eq!(memory.read(address + 28, &mut [0; 8]), Err(CudaError::INVALID_VALUE));
        memory.unregister(address).unwrap();
        assert_eq!(memory.unregister(address), Err(CudaError::HOST_MEMORY_NOT_REGISTERED));
        assert!(!memory.is_registered(address));
    }

    #[test]
    fn managed_memory_is_noticed_until_it_is_freed() {
        let mut memory = Memory::new();
        let address = memory.allocate_managed(100).unwrap();
        memory.write(address, &[1, 2, 3]).unwrap();
        assert!(memory.has_managed());
        memory.free(address).unwrap();
        assert!(!memory.has_managed());
        assert_eq!(memory.free(address), Err(CudaError::INVALID_VALUE));
    }
}

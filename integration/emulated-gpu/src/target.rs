//! The CUDA process itself: its GPUs, the gate before its calls, and the restore
//! thread that carries out what callers ask.
//!
//! ```text
//! RUNNING -lock-> LOCKED -checkpoint-> CHECKPOINTED -restore-> LOCKED -unlock-> RUNNING
//! ```
//! Every other step is `ILLEGAL_STATE`. A restore that found too little memory leaves
//! CHECKPOINTED for good. FAILED is reached when a checkpoint finds that device memory
//! is gone; no step leaves it.
//!
//! Memory imported from another process is lost in a checkpoint: both processes lock
//! and checkpoint with 0, the exporter's restore is good, the importer's fails with 1,
//! again with 304, and it stays CHECKPOINTED, in either order. Measured on 580, assumed
//! for later ones; in a `job` 610 keeps it.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow};

use crate::cuda_error::{CudaError, Result, code};
use crate::job::{self, Caller, Membership, Operation, Ticket};
use crate::kernels::{KERNELS, Stream, Work};
use crate::mailbox::{self, Action};
use crate::memory::Memory;
use crate::ptx::Ptx;
use crate::raw::AnonMapping;
use crate::settings::{Settings, Uuid, device_path};
use crate::store::{Alive, Key, StoreLock};
use crate::{EVENT_THREAD, RESTORE_THREAD};

/// How often the restore thread looks for a request.
const POLL: Duration = Duration::from_millis(2);

/// How often a call looks whether it may go on: at the gate, and for work in flight.
const WAIT: Duration = Duration::from_micros(300);

/// Bytes that a checkpoint copies at a time.
const CHUNK: usize = 4 << 20;

/// `CUprocessState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running = 0,
    Locked = 1,
    Checkpointed = 2,
    Failed = 3,
}

/// A process after `cuInit`.
struct Target {
    /// The pid at `cuInit`. A fork has another and none of the threads; a CRIU restore has the same.
    pid: u32,
    gate: Gate,
    gpu: Mutex<Gpu>,
    /// Whether `cuda-EvtHandlr` runs: from the first context on.
    events: Mutex<bool>,
    handshake: Handshake,
    /// The job that it joined at `cuInit`.
    job: Option<Membership>,
}

static TARGET: OnceLock<Target> = OnceLock::new();

thread_local! {
    /// Ordinal of the device whose context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// What a process knows of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct Card {
    /// Its number in the machine.
    index: u32,
    pub(crate) uuid: Uuid,
    pub(crate) name: String,
}

impl Card {
    fn of(settings: &Settings, index: u32) -> Self {
        Self { index, uuid: settings.uuid(index), name: settings.name(index).to_owned() }
    }
}

/// A GPU as this process sees it; its place in the list is its ordinal.
struct Device {
    card: Card,
    node: Option<File>,
}

impl Device {
    fn open(card: Card) -> Result<Self> {
        let node = OpenOptions::new().read(true).write(true).open(device_path(card.index));
        Ok(Self { card, node: Some(node.map_err(|_| CudaError::NO_DEVICE)?) })
    }
}

/// A loaded module.
struct Module {
    entries: Vec<String>,
    /// Address and size of each variable.
    globals: BTreeMap<String, (u64, usize)>,
}

/// Everything that API calls change.
pub(crate) struct Gpu {
    devices: Vec<Device>,
    /// Ordinals of the devices on which it has a context.
    contexts: BTreeSet<usize>,
    alive: Option<Alive>,
    pub(crate) memory: Memory,
    stream: Stream,
    modules: Vec<Module>,
    /// A kernel failed: the context is of no more use.
    broken: Option<CudaError>,
}

impl Gpu {
    /// Index of the GPU whose context is current.
    pub(crate) fn current(&self) -> Result<u32> {
        let ordinal = CURRENT.get().ok_or(CudaError::INVALID_CONTEXT)?;
        Ok(self.devices.get(ordinal).ok_or(CudaError::INVALID_CONTEXT)?.card.index)
    }

    /// Allocates on the current GPU.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Result<u64> {
        let gpu = self.current()?;
        self.memory.allocate(gpu, bytes, &Settings::current()?)
    }

    /// Loads a module; the handle is its number.
    pub(crate) fn load(&mut self, text: &str) -> Result<usize> {
        let ptx = Ptx::parse(text)?;
        let mut globals = BTreeMap::new();
        for (name, bytes) in ptx.globals {
            let address = self.allocate(bytes.len() as u64)?;
            self.memory.write(address, &bytes)?;
            globals.insert(name, (address, bytes.len()));
        }
        self.modules.push(Module { entries: ptx.entries, globals });
        Ok(self.modules.len() - 1)
    }

    /// Number in [`KERNELS`] of a kernel that the module names.
    pub(crate) fn function(&self, module: usize, name: &str) -> Result<usize> {
        let module = self.modules.get(module).ok_or(CudaError::INVALID_HANDLE)?;
        if !module.entries.iter().any(|entry| entry == name) {
            return Err(CudaError::NOT_FOUND);
        }
        KERNELS.iter().position(|kernel| kernel.0 == name).ok_or(CudaError::NOT_FOUND)
    }

    /// Address and size of a variable of the module.
    pub(crate) fn global(&self, module: usize, name: &str) -> Result<(u64, usize)> {
        let module = self.modules.get(module).ok_or(CudaError::INVALID_HANDLE)?;
        module.globals.get(name).copied().ok_or(CudaError::NOT_FOUND)
    }

    /// Queues a kernel.
    pub(crate) fn launch(&mut self, work: Work) {
        // A kernel's failure is told by the next call, as on a real GPU.
        if let Err(error) = self.stream.launch(work, &self.memory) {
            self.broken = Some(kernel_error(error));
        }
    }

    /// Moves the stream on; true if nothing is in flight.
    fn advance(&mut self) -> Result<bool> {
        let result = self.stream.advance(&self.memory).map_err(kernel_error);
        if let Err(error) = result {
            self.broken = Some(error);
        }
        self.broken.map_or(result, Err)
    }
}

/// A kernel that reaches beyond its memory fails in another way than a call does.
fn kernel_error(error: CudaError) -> CudaError {
    if error == CudaError::INVALID_VALUE { CudaError::ILLEGAL_ADDRESS } else { error }
}

/// Counts the calls in flight and keeps out new ones while the process is locked.
/// Without a mutex: a thread that ptrace stops at the gate must not hold up a lock.
struct Gate(AtomicU32);

const CLOSED: u32 = 1 << 31;

impl Gate {
    fn enter(&self) -> Inside<'_> {
        loop {
            let calls = self.0.load(Ordering::SeqCst);
            if calls & CLOSED != 0 {
                thread::sleep(POLL);
            } else if self
                .0
                .compare_exchange(calls, calls + 1, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
            {
                return Inside(self);
            }
        }
    }

    fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::SeqCst);
    }

    fn open(&self) {
        self.0.fetch_and(!CLOSED, Ordering::SeqCst);
    }

    fn is_empty(&self) -> bool {
        self.0.load(Ordering::SeqCst) & !CLOSED == 0
    }
}

/// A call in flight.
struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What a lock needs of `cuda-EvtHandlr`: an answer, and without a time limit.
#[derive(Default)]
struct Handshake {
    /// (asked, answered)
    counts: Mutex<(u64, u64)>,
    changed: Condvar,
}

impl Handshake {
    fn ask(&self) {
        let mut counts = hold(&self.counts);
        counts.0 += 1;
        self.changed.notify_all();
        while counts.1 < counts.0 {
            counts = self.changed.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn answer_for_ever(&self) {
        let mut counts = hold(&self.counts);
        loop {
            counts.1 = counts.0;
            self.changed.notify_all();
            counts = self.changed.wait(counts).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A panic elsewhere ends the process anyway (it crosses into C), so poison says nothing.
fn hold<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `cuInit`: opens the devices and starts the restore thread. From then on this is a
/// CUDA process, even if it only asks about others.
pub(crate) fn init() -> Result<()> {
    static ONCE: Mutex<()> = Mutex::new(());
    let _once = hold(&ONCE);
    if TARGET.get().is_some() {
        return target().map(|_| ());
    }
    let settings = Settings::current()?;
    thread::sleep(settings.cuinit);
    let job = Membership::join(&settings)?;
    let visible = settings.visible();
    if visible.is_empty() {
        return Err(CudaError::NO_DEVICE);
    }
    let cards = visible.into_iter().map(|index| Card::of(&settings, index));
    let gpu = Gpu {
        devices: cards.map(Device::open).collect::<Result<_>>()?,
        contexts: BTreeSet::new(),
        alive: None,
        memory: Memory::new(),
        stream: Stream::default(),
        modules: Vec::new(),
        broken: None,
    };
    let target = TARGET.get_or_init(|| Target {
        pid: std::process::id(),
        gate: Gate(AtomicU32::new(0)),
        gpu: Mutex::new(gpu),
        events: Mutex::new(false),
        handshake: Handshake::default(),
        job,
    });
    spawn(RESTORE_THREAD, || RestoreThread::new(target).serve())
}

/// The job file that this process names when it asks others.
pub(crate) fn as_caller() -> Result<Option<Caller>> {
    target()?.job.as_ref().map(Membership::caller).transpose()
}

/// Starts a thread of the driver, on which the application's signal handlers do not run. When this
/// returns it has its name, by which others find it.
fn spawn(comm: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let (begins, begun) = mpsc::channel::<Infallible>();
    let spawned = thread::Builder::new().name(comm.into()).spawn(move || {
        drop(begins);
        body();
    });
    before.thread_set_mask()?;
    spawned?;
    // It says nothing: that it has let go of its end is enough.
    let _ = begun.recv();
    Ok(())
}

/// Fails before `cuInit`, and in the fork of a process that has called it.
#[cfg(feature = "checkpoint-api")]
pub(crate) fn check_initialized() -> Result<()> {
    target().map(|_| ())
}

fn target() -> Result<&'static Target> {
    TARGET.get().filter(|target| target.pid == std::process::id()).ok_or(CudaError::NOT_INITIALIZED)
}

/// The GPUs that the process sees, by ordinal.
pub(crate) fn devices() -> Result<Vec<Card>> {
    let gpu = hold(&target()?.gpu);
    Ok(gpu.devices.iter().map(|device| device.card.clone()).collect())
}

/// Makes a context on the device; with the first one the process takes its place in
/// the store.
pub(crate) fn create_context(ordinal: usize) -> Result<()> {
    let target = target()?;
    let _inside = target.gate.enter();
    let mut gpu = hold(&target.gpu);
    if ordinal >= gpu.devices.len() {
        return Err(CudaError::INVALID_DEVICE);
    }
    let mut events = hold(&target.events);
    if !*events {
        gpu.alive = Some(StoreLock::take()?.claim(&Key::own()?.entry())?);
        spawn(EVENT_THREAD, || target.handshake.answer_for_ever())?;
        *events = true;
    }
    if gpu.contexts.insert(ordinal) {
        let alive = gpu.alive.as_ref().ok_or(CudaError::ILLEGAL_STATE)?;
        alive.uses(&StoreLock::take()?, &with_contexts(&gpu.devices, &gpu.contexts))?;
    }
    Ok(())
}

/// Indices of the GPUs with these ordinals.
fn with_contexts(devices: &[Device], contexts: &BTreeSet<usize>) -> Vec<u32> {
    contexts.iter().filter_map(|ordinal| Some(devices.get(*ordinal)?.card.index)).collect()
}

/// Makes the context of a device current in this thread.
pub(crate) fn set_current(ordinal: Option<usize>) {
    CURRENT.set(ordinal);
}

/// An API call that needs a context. It waits while the process is locked, and a
/// lock waits for it.
pub(crate) fn call<T>(body: impl FnOnce(&mut Gpu) -> Result<T>) -> Result<T> {
    let target = target()?;
    let _inside = target.gate.enter();
    let mut gpu = hold(&target.gpu);
    gpu.current()?;
    gpu.broken.map_or(Ok(()), Err)?;
    body(&mut gpu)
}

/// Like [`call`], after all work in flight.
pub(crate) fn call_in_order<T>(body: impl FnOnce(&mut Gpu) -> Result<T>) -> Result<T> {
    let target = target()?;
    let _inside = target.gate.enter();
    loop {
        let mut gpu = hold(&target.gpu);
        gpu.current()?;
        if gpu.advance()? {
            return body(&mut gpu);
        }
        drop(gpu);
        thread::sleep(WAIT);
    }
}

/// The thread that answers callers; it alone knows and changes the state.
struct RestoreThread {
    target: &'static Target,
    state: State,
    /// The device's memory while CHECKPOINTED, one allocation after the other.
    saved: Option<AnonMapping>,
    /// A restore has failed in a way from which there is no return.
    lost: bool,
    /// The checkpoint has lost what was imported; the restore will find out.
    loses: bool,
    /// What it wrote into the job file at its last checkpoint.
    ticket: Option<Ticket>,
    /// A checkpoint was refused for managed memory: the real driver refuses all later ones,
    /// in another way, even when that memory is freed.
    refused: bool,
}

impl RestoreThread {
    fn new(target: &'static Target) -> Self {
        Self {
            target,
            state: State::Running,
            saved: None,
            lost: false,
            loses: false,
            ticket: None,
            refused: false,
        }
    }

    fn serve(mut self) {
        loop {
            // Read anew each time: the process may be another one since the last look.
            let Some(request) = Key::own().ok().and_then(mailbox::take) else {
                thread::sleep(POLL);
                continue;
            };
            let result = self.operate(&request.action, request.caller);
            request.answer(code(&result), self.state as i32);
        }
    }

    /// One operation; in a job nobody else's runs meanwhile, whether the caller lives or not.
    fn operate(&mut self, action: &Action, caller: Option<Caller>) -> Result<()> {
        if *action == Action::State {
            return Ok(());
        }
        // Held to the end, and let go before the answer: then the process may be dumped.
        let mut job = self.target.job.as_ref().map(|job| job.begin(caller)).transpose()?;
        match action {
            Action::State => Ok(()),
            Action::Lock { timeout_ms } => self.lock(*timeout_ms),
            Action::Checkpoint => self.checkpoint(job.as_mut()),
            Action::Restore(map) => self.restore(map, job.as_mut()),
            Action::Unlock => self.unlock(),
        }
    }

    fn expect(&self, state: State) -> Result<()> {
        if self.state == state { Ok(()) } else { Err(CudaError::ILLEGAL_STATE) }
    }

    fn lock(&mut self, timeout_ms: u32) -> Result<()> {
        self.expect(State::Running)?;
        if *hold(&self.target.events) {
            self.target.handshake.ask();
        }
        let timeout = Duration::from_millis(timeout_ms.into());
        let began = Instant::now();
        self.target.gate.close();
        loop {
            // Only with no call inside: a stopped thread may hold the GPU's mutex.
            if self.target.gate.is_empty() && hold(&self.target.gpu).advance() != Ok(false) {
                self.state = State::Locked;
                return Ok(());
            }
            if timeout_ms != 0 && began.elapsed() >= timeout {
                self.target.gate.open();
                return Err(CudaError::NOT_READY);
            }
            thread::sleep(WAIT);
        }
    }

    fn unlock(&mut self) -> Result<()> {
        self.expect(State::Locked)?;
        self.state = State::Running;
        self.target.gate.open();
        Ok(())
    }

    fn checkpoint(&mut self, job: Option<&mut Operation>) -> Result<()> {
        self.expect(State::Locked)?;
        let mut gpu = hold(&self.target.gpu);
        if gpu.memory.has_managed() {
            self.refused = true;
            return Err(CudaError::NOT_SUPPORTED);
        }
        if self.refused {
            return Err(CudaError::UNKNOWN);
        }
        let settings = Settings::current()?;
        let entry = Key::own()?.entry();
        let data: u64 = gpu.memory.allocations().values().map(|a| a.bytes).sum();
        let size = data.checked_add(settings.reserve_bytes).and_then(|n| usize::try_from(n).ok());
        let mut saved = AnonMapping::new(size.ok_or(CudaError::OUT_OF_MEMORY)?)
            .map_err(|_| CudaError::OUT_OF_MEMORY)?;
        let mut pace = Pace::new(settings.copy_bytes_per_second);
        let mut rest = saved.bytes_mut();
        for (address, allocation) in gpu.memory.allocations() {
            let len = usize::try_from(allocation.bytes).map_err(|_| CudaError::OUT_OF_MEMORY)?;
            let (bytes, after) = rest.split_at_mut(len);
            rest = after;
            let copied = File::open(entry.memory(allocation.gpu, *address)).and_then(|mut file| {
                bytes.chunks_mut(CHUNK).try_for_each(|chunk| {
                    pace.copied(chunk.len());
                    file.read_exact(chunk)
                })
            });
            if copied.is_err() {
                self.state = State::Failed;
                return Err(CudaError::UNKNOWN);
            }
        }
        // The driver's own data: touched, so that it counts and is dumped.
        rest.fill(0xcd);
        self.loses = gpu.memory.has_imports() && !(job.is_some() && job::keeps_imports(&settings));
        if let Some(job) = job {
            self.ticket = Some(job.record(self.ticket)?);
        }
        if gpu.alive.take().is_some() {
            StoreLock::take()?.release(&entry)?;
        }
        for device in &mut gpu.devices {
            device.node = None;
        }
        self.saved = Some(saved);
        self.state = State::Checkpointed;
        Ok(())
    }

    fn restore(&mut self, map: &[(Uuid, Uuid)], job: Option<&mut Operation>) -> Result<()> {
        self.expect(State::Checkpointed)?;
        if self.lost {
            return Err(CudaError::OPERATING_SYSTEM);
        }
        if self.loses {
            self.lost = true;
            return Err(CudaError::INVALID_VALUE);
        }
        job.as_deref().map_or(Ok(()), |job| job.admit(self.ticket))?;
        let mut gpu = hold(&self.target.gpu);
        let settings = Settings::current()?;
        let devices = find_devices(&gpu.devices, map, &settings)?;
        let indices = |devices: &[Device]| devices.iter().map(|d| d.card.index).collect::<Vec<_>>();
        let moved: BTreeMap<u32, u32> =
            indices(&gpu.devices).into_iter().zip(indices(&devices)).collect();
        let new_index = |gpu: u32| moved.get(&gpu).copied().unwrap_or(gpu);
        let entry = Key::own()?.entry();

        let store = StoreLock::take()?;
        // A process that had no context was not in the store.
        let alive = hold(&self.target.events).then(|| store.claim(&entry)).transpose()?;
        if let Some(alive) = &alive {
            alive.uses(&store, &with_contexts(&devices, &gpu.contexts))?;
        }
        for index in indices(&devices) {
            let mine = gpu.memory.allocations().values();
            let need = mine.filter(|a| new_index(a.gpu) == index).map(|a| a.bytes).sum();
            if let Err(error) = store.reserve(index, need, &settings) {
                self.lost = true;
                return Err(error);
            }
        }
        let create = || {
            gpu.memory.allocations().iter().try_for_each(|(address, allocation)| {
                store.create(&entry.memory(new_index(allocation.gpu), *address), allocation.bytes)
            })
        };
        create().inspect_err(|_| drop(store.release(&entry)))?;
        drop(store);

        let saved = self.saved.as_ref().ok_or(CudaError::ILLEGAL_STATE)?;
        let mut pace = Pace::new(settings.copy_bytes_per_second);
        let mut rest = saved.bytes();
        for (address, allocation) in gpu.memory.allocations() {
            let len = usize::try_from(allocation.bytes).map_err(|_| CudaError::OUT_OF_MEMORY)?;
            let (bytes, after) = rest.split_at(len);
            rest = after;
            let path = entry.memory(new_index(allocation.gpu), *address);
            let mut file = OpenOptions::new().write(true).open(path)?;
            for chunk in bytes.chunks(CHUNK) {
                pace.copied(chunk.len());
                std::io::Write::write_all(&mut file, chunk)?;
            }
        }
        if let Some(job) = job {
            job.consume(self.ticket)?;
        }
        gpu.memory.move_to(new_index);
        gpu.devices = devices;
        gpu.alive = alive;
        self.saved = None;
        self.state = State::Locked;
        Ok(())
    }
}

/// The GPUs that take over from `old`, in the same order, opened.
///
/// A list must name every GPU that the process has found at `cuInit`. A GPU that is not here, whose
/// node is missing or cannot be opened, is an invalid value; another list can be tried. So is one of
/// another chip, which was read and not measured. (Without a list the same GPUs have to be here;
/// that anything else is an invalid value is assumed.)
fn find_devices(old: &[Device], map: &[(Uuid, Uuid)], settings: &Settings) -> Result<Vec<Device>> {
    let visible = settings.visible();
    let mut devices: Vec<Device> = Vec::new();
    for Device { card, .. } in old {
        let uuid = if map.is_empty() {
            card.uuid
        } else {
            map.iter().find(|pair| pair.0 == card.uuid).ok_or(CudaError::INVALID_VALUE)?.1
        };
        let index = visible.iter().find(|index| settings.uuid(**index) == uuid);
        let new = Card::of(settings, *index.ok_or(CudaError::INVALID_VALUE)?);
        let taken = devices.iter().any(|other| other.card.index == new.index);
        if taken || new.name != card.name {
            return Err(CudaError::INVALID_VALUE);
        }
        devices.push(Device::open(new).map_err(|_| CudaError::INVALID_VALUE)?);
    }
    Ok(devices)
}

/// Slows copying down to the speed of the settings.
struct Pace {
    bytes_per_second: u64,
    bytes: u64,
    began: Instant,
}

impl Pace {
    fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, bytes: 0, began: Instant::now() }
    }

    fn copied(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        let micros = self.bytes.saturating_mul(1_000_000).checked_div(self.bytes_per_second);
        if let Some(micros) = micros {
            thread::sleep(Duration::from_micros(micros).saturating_sub(self.began.elapsed()));
        }
    }
}

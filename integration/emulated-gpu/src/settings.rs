//! Where the store is, and what `STORE/config` says about the machine.
//!
//! The file has one `key=value` a line; `#` begins a comment. It is read again
//! at each use, because a restored process may find itself on another "machine".
//!
//! | key | meaning | default |
//! |---|---|---|
//! | `driver` | driver version; what is before the first dot is the branch, which decides what the driver can do | `580.159.04` |
//! | `cuda` | CUDA version as `cuDriverGetVersion` gives it | the one that the branch came with |
//! | `gpus` | number of GPUs | `1` |
//! | `names` | product names of the GPUs in their order, with commas between them; what is not named is an `Emulated GPU` | |
//! | `memory` | bytes per GPU | `8589934592` |
//! | `uuid-seed` | another number gives the GPUs other UUIDs | `0` |
//! | `cuinit-ms` | how long `cuInit` takes | `10` |
//! | `copy-bytes-per-second` | speed of checkpoint and restore, 0 for no limit | `0` |
//! | `reserve-bytes` | host bytes that a checkpoint takes on top of the data | `0` |
//! | `context-bytes` | bytes that a context takes of its GPU and NVML shows of no process (6 to 9 MiB on an H200) | `0` |
//! | `lost-gpu` | the index of a GPU that has fallen off the bus: NVML knows no more of it than that | |

use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::Duration;

use crate::cuda_error::{CudaError, Result};

/// The first branch of the driver that restores onto another GPU.
pub(crate) const REMAP: u32 = 580;

/// The 16 bytes of a GPU's UUID.
pub type Uuid = [u8; 16];

/// What `STORE/config` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Driver version, for NVML.
    pub driver: String,
    /// CUDA version, such as 13000.
    pub cuda: i32,
    /// Number of GPUs in the machine.
    pub gpus: u32,
    /// Product names of the first GPUs.
    pub names: Vec<String>,
    /// Bytes per GPU.
    pub memory: u64,
    /// Makes the UUIDs of this machine differ from another's.
    pub uuid_seed: u64,
    /// Cost of `cuInit`.
    pub cuinit: Duration,
    /// Speed of checkpoint and restore; 0 for no limit.
    pub copy_bytes_per_second: u64,
    /// Host bytes that a checkpoint takes on top of the data.
    pub reserve_bytes: u64,
    /// Bytes that a context takes of its GPU and NVML shows of no process.
    pub context_bytes: u64,
    /// The GPU that has fallen off the bus, for NVML.
    pub lost_gpu: Option<u32>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            driver: "580.159.04".into(),
            cuda: cuda_of(580),
            gpus: 1,
            names: Vec::new(),
            memory: 8 << 30,
            uuid_seed: 0,
            cuinit: Duration::from_millis(10),
            copy_bytes_per_second: 0,
            reserve_bytes: 0,
            context_bytes: 0,
            lost_gpu: None,
        }
    }
}

impl FromStr for Settings {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut settings = Self::default();
        let mut cuda = None;
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (key, value) = line.split_once('=').ok_or_else(|| format!("no '=' in: {line}"))?;
            let (key, value) = (key.trim(), value.trim());
            match key {
                "driver" => {
                    number::<u32>(key, value.split('.').next().unwrap_or_default())?;
                    settings.driver = value.into();
                }
                "cuda" => cuda = Some(number(key, value)?),
                "gpus" => settings.gpus = number(key, value)?,
                "names" => settings.names = value.split(',').map(|n| n.trim().into()).collect(),
                "memory" => settings.memory = number(key, value)?,
                "uuid-seed" => settings.uuid_seed = number(key, value)?,
                "cuinit-ms" => settings.cuinit = Duration::from_millis(number(key, value)?),
                "copy-bytes-per-second" => settings.copy_bytes_per_second = number(key, value)?,
                "reserve-bytes" => settings.reserve_bytes = number(key, value)?,
                "context-bytes" => settings.context_bytes = number(key, value)?,
                "lost-gpu" => settings.lost_gpu = Some(number(key, value)?),
                _ => return Err(format!("unknown key: {key}")),
            }
        }
        settings.cuda = cuda.unwrap_or_else(|| cuda_of(settings.branch()));
        Ok(settings)
    }
}

impl Settings {
    /// Reads the settings of the process's store.
    pub(crate) fn current() -> Result<Self> {
        let path = store_dir().join("config");
        match fs::read_to_string(&path) {
            Ok(text) => text.parse().map_err(|reason: String| {
                complain(&path, &reason);
                CudaError::UNKNOWN
            }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error.into()),
        }
    }

    /// The branch of the driver, such as 580.
    #[must_use]
    pub fn branch(&self) -> u32 {
        let branch = self.driver.split('.').next();
        branch.and_then(|number| number.parse().ok()).unwrap_or_default()
    }

    /// Product name of the machine's GPU `index`.
    #[must_use]
    pub fn name(&self, index: u32) -> &str {
        let name = usize::try_from(index).ok().and_then(|index| self.names.get(index));
        name.filter(|name| !name.is_empty()).map_or("Emulated GPU", String::as_str)
    }

    /// UUID of the machine's GPU `index`.
    #[must_use]
    pub fn uuid(&self, index: u32) -> Uuid {
        let mut uuid = *b"\xe0\x5e\x1a\x7e\0\0\0\0\0\0\0\0\0\0\0\0";
        uuid[4..12].copy_from_slice(&self.uuid_seed.to_be_bytes());
        uuid[12..].copy_from_slice(&index.to_be_bytes());
        uuid
    }

    /// Indices of the GPUs whose device node this process can see.
    pub(crate) fn visible(&self) -> Vec<u32> {
        (0..self.gpus).filter(|index| device_path(*index).exists()).collect()
    }
}

/// The CUDA version that a branch of the driver came with.
fn cuda_of(branch: u32) -> i32 {
    match branch {
        ..555 => 12040,
        555..570 => 12050,
        570..580 => 12080,
        580..590 => 13000,
        590..610 => 13010,
        610.. => 13030,
    }
}

fn number<T: FromStr>(key: &str, value: &str) -> std::result::Result<T, String> {
    value.parse().map_err(|_| format!("{key}: not a number that fits: {value}"))
}

/// `GPU-` and the UUID, as NVML writes it.
#[must_use]
pub fn format_uuid(uuid: &Uuid) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The UUID that [`format_uuid`] has written.
#[must_use]
pub fn parse_uuid(text: &str) -> Option<Uuid> {
    let digits = text.strip_prefix("GPU-")?.replace('-', "");
    let uuid = u128::from_str_radix(&digits, 16).ok()?.to_be_bytes();
    (format_uuid(&uuid) == text).then_some(uuid)
}

/// The store of this process. The answer never changes: a program may alter its
/// environment, and after a CRIU restore the same path is meant.
pub(crate) fn store_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        std::env::var_os("EMULATED_GPU_DIR").unwrap_or_else(|| "/dev/nvidia-emulated".into()).into()
    })
}

/// The device node of GPU `index`.
pub(crate) fn device_path(index: u32) -> PathBuf {
    static PATTERN: OnceLock<String> = OnceLock::new();
    let from_environment = || std::env::var("EMULATED_GPU_DEVICE").ok();
    PATTERN
        .get_or_init(|| from_environment().unwrap_or_else(|| "/dev/nvidia{}".into()))
        .replace("{}", &index.to_string())
        .into()
}

/// Says on stderr what is wrong with a file of the store: a test that orders
/// something misspelt must not go on as if it had ordered nothing.
pub(crate) fn complain(path: &Path, reason: &str) {
    eprintln!("emulated GPU: {}: {reason}", path.display());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_key() {
        let text = "# a machine\ncuda=13050\ndriver=610.1\ngpus=2\nnames=A, B\nmemory=1024\n\
                    uuid-seed=7\ncuinit-ms=0\ncopy-bytes-per-second=5\nreserve-bytes=6\n\
                    context-bytes=8\nlost-gpu=1\n\n";
        let settings: Settings = text.parse().unwrap();
        let expected = Settings {
            driver: "610.1".into(),
            cuda: 13050,
            gpus: 2,
            names: vec!["A".into(), "B".into()],
            memory: 1024,
            uuid_seed: 7,
            cuinit: Duration::ZERO,
            copy_bytes_per_second: 5,
            reserve_bytes: 6,
            context_bytes: 8,
            lost_gpu: Some(1),
        };
        assert_eq!(settings, expected);
        assert_eq!((settings.branch(), Settings::default().branch()), (610, 580));
    }

    #[test]
    fn a_driver_brings_its_cuda() {
        let cuda = |text: &str| text.parse::<Settings>().unwrap().cuda;
        let table = [
            ("550.54.15", 12040),
            ("555.42.02", 12050),
            ("570.86.10", 12080),
            ("580.159.04", 13000),
            ("590.44.01", 13010),
            ("610.43.02", 13030),
        ];
        for (driver, version) in table {
            assert_eq!(cuda(&format!("driver={driver}")), version, "{driver}");
        }
        assert_eq!(cuda(""), 13000);
    }

    #[test]
    fn gpus_have_names() {
        let settings: Settings = "gpus=3\nnames=, Emulated B".parse().unwrap();
        let names = [0, 1, 2].map(|index| settings.name(index));
        assert_eq!(names, ["Emulated GPU", "Emulated B", "Emulated GPU"]);
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        assert!("memry=1".parse::<Settings>().unwrap_err().contains("memry"));
        assert!("memory=8GiB".parse::<Settings>().unwrap_err().contains("8GiB"));
        assert!("memory".parse::<Settings>().is_err());
        assert!("driver=new".parse::<Settings>().is_err());
    }

    #[test]
    fn uuids_differ_by_gpu_and_machine() {
        let here = Settings::default();
        let there = Settings { uuid_seed: 1, ..Settings::default() };
        assert_ne!(here.uuid(0), here.uuid(1));
        assert_ne!(here.uuid(0), there.uuid(0));
        assert_eq!(format_uuid(&here.uuid(1)), "GPU-e05e1a7e-0000-0000-0000-000000000001");
        assert_eq!(parse_uuid(&format_uuid(&there.uuid(3))), Some(there.uuid(3)));
        assert_eq!(parse_uuid("GPU-e05e1a7e"), None);
    }
}

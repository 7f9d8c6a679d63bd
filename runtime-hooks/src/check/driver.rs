//! What the driver of this host can do.

use std::path::PathBuf;

use stasis_config::Config;
use stasis_config::manifest::Gpu;

use super::version::Version;
use super::{Check, Finding, Host, jobs};

const DRIVER: Check = Check { id: "driver", title: "driver" };
const LIBCUDA: Check = Check { id: "libcuda", title: "libcuda" };
const GPUS: Check = Check { id: "gpus", title: "GPUs" };

/// Asks the driver. Behind it is the helper process, with its deadline.
pub trait DriverInfo {
    /// What the driver is. The error says what failed, and where libcuda was looked for if it was
    /// not found.
    fn driver(&self) -> Result<DriverFacts, String>;
}

/// What the driver is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverFacts {
    /// Which library was loaded.
    pub libcuda: PathBuf,
    /// As NVML names it, such as `580.159.04`; `None` without NVML.
    pub driver_version: Option<String>,
    /// `cuDriverGetVersion`: 13000 is CUDA 13.0.
    pub cuda_version: u32,
    /// The library has all of the checkpoint API.
    pub checkpoint_api: bool,
    /// As NVML lists them; empty without NVML.
    pub gpus: Vec<Gpu>,
    /// What the library does not have of the checkpoint API.
    pub missing: Vec<String>,
    /// NVIDIA's command, where that is used instead.
    pub utility: Option<PathBuf>,
    /// Why it is not, where the library cannot checkpoint.
    pub no_utility: Option<String>,
    /// It can only toggle.
    pub toggles: bool,
}

/// The first branch whose libcuda has the checkpoint API.
const API: u32 = 570;
/// The first branch that can checkpoint at all, by NVIDIA's command only.
const COMMAND: u32 = 550;
/// The first branch whose command does each step by itself.
const SEPARATE: u32 = 555;
/// The first version that checkpoints a container that sees some of the host's GPUs.
const SUBSET: Version = Version([575, 57, 8]);
/// The first branch that can restore onto other GPUs.
const REMAP: u32 = 580;
/// The first branch for arm64.
const ARM: u32 = 595;
/// The first branch that keeps `cuIpcGetMemHandle` memory, in a job.
pub(super) const IPC: u32 = 610;

pub(super) fn driver(host: &dyn Host, driver: &dyn DriverInfo, config: &Config) -> Vec<Finding> {
    match driver.driver() {
        Ok(facts) => vec![
            version(host, &facts),
            libcuda(&facts),
            gpus(&facts),
            jobs::jobs(host, &facts, config),
        ],
        Err(why) => vec![DRIVER.error(why).remedy(format!(
            "install NVIDIA's driver from {API} (or from {COMMAND}, with its cuda-checkpoint), or set \
             cuda.libcuda in the configuration"
        ))],
    }
}

fn version(host: &dyn Host, facts: &DriverFacts) -> Finding {
    let cuda = format!("CUDA {}.{}", facts.cuda_version / 1000, facts.cuda_version % 1000 / 10);
    let known = facts.driver_version.as_deref().and_then(Version::parse);
    let name = match &facts.driver_version {
        Some(version) => format!("{version} ({cuda})"),
        None => format!("of unknown version ({cuda})"),
    };
    let update = format!(
        "update NVIDIA's driver to {API} or later, best to {REMAP} or later (from {COMMAND} on NVIDIA's \
         cuda-checkpoint does, too)"
    );

    if let Some(version) = known {
        if version.major() < COMMAND {
            return DRIVER.error(format!("{name} cannot checkpoint")).remedy(update);
        }
        if host.arch() == "aarch64" && version.major() < ARM {
            return DRIVER
                .error(format!("{name} cannot checkpoint on arm64"))
                .remedy(format!("update NVIDIA's driver to {ARM} or later"));
        }
    }
    if !facts.checkpoint_api || !facts.missing.is_empty() {
        let missing = if facts.missing.is_empty() {
            "the checkpoint API".to_owned()
        } else {
            facts.missing.join(", ")
        };
        let instead = facts.no_utility.as_ref().map(|why| {
            format!("; NVIDIA's command, which can from {COMMAND} on, is of no use: {why}")
        });
        let instead = instead.unwrap_or_default();
        let message = format!("{name}: its libcuda does not have {missing} (needs {API}){instead}");
        return DRIVER.error(message).remedy(update);
    }
    if facts.toggles {
        return DRIVER
            .warning(format!(
                "{name}: checkpoints, but in one step with the lock, by NVIDIA's command: a container \
                 is killed if that is refused or does not end in time (its driver can be asked and \
                 unlocked from {SEPARATE} on)"
            ))
            .remedy(update);
    }
    let Some(version) = known else {
        return DRIVER
            .warning(format!("{name}: can checkpoint; NVML does not tell the version"))
            .remedy("install libnvidia-ml.so.1 of the driver, or set cuda.libnvml");
    };
    if version < SUBSET && facts.gpus.len() > 1 {
        return DRIVER
            .warning(format!("{name}: only containers that see all GPUs can be checkpointed"))
            .remedy(format!("update NVIDIA's driver to {SUBSET} or later"));
    }
    let can = |since, what: &str, not: &str| {
        if version.major() >= since { what.to_owned() } else { format!("{not} (needs {since})") }
    };
    let by = match &facts.utility {
        Some(utility) => format!(" by {}", utility.display()),
        None => String::new(),
    };
    DRIVER.ok(format!(
        "{name}: checkpoints{by}, {}, {}",
        can(REMAP, "restores onto other GPUs", "does not restore onto other GPUs"),
        can(IPC, "keeps IPC memory in a job", "does not keep IPC memory"),
    ))
}

fn libcuda(facts: &DriverFacts) -> Finding {
    LIBCUDA.ok(facts.libcuda.display().to_string())
}

fn gpus(facts: &DriverFacts) -> Finding {
    if facts.gpus.is_empty() {
        return GPUS
            .warning("NVML lists none, so a manifest cannot name them")
            .remedy("install libnvidia-ml.so.1 of the driver, or set cuda.libnvml");
    }
    let all: Vec<_> = facts
        .gpus
        .iter()
        .map(|gpu| format!("{} {} ({} MiB)", gpu.name, gpu.uuid, gpu.memory_bytes >> 20))
        .collect();
    GPUS.ok(all.join(", "))
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Level;
    use super::super::fake::{Fake, said};
    use super::*;

    pub(in super::super) struct FakeDriver(pub(in super::super) Result<DriverFacts, String>);

    impl DriverInfo for FakeDriver {
        fn driver(&self) -> Result<DriverFacts, String> {
            self.0.clone()
        }
    }

    pub(in super::super) fn h200() -> DriverFacts {
        DriverFacts {
            libcuda: "/usr/lib/x86_64-linux-gnu/libcuda.so.1".into(),
            driver_version: Some("580.159.04".into()),
            cuda_version: 13000,
            checkpoint_api: true,
            gpus: vec![Gpu {
                uuid: "GPU-5d8c5b7e-8a3f-4b0e-9d5e-0c1f2a3b4c5d".into(),
                name: "NVIDIA H200".into(),
                memory_bytes: 150_754_820_096,
            }],
            missing: Vec::new(),
            utility: None,
            no_utility: None,
            toggles: false,
        }
    }

    fn of(change: impl FnOnce(&mut DriverFacts)) -> String {
        let mut facts = h200();
        change(&mut facts);
        said(&version(&Fake::good(), &facts))
    }

    fn of_version(version: &str) -> String {
        of(|facts| facts.driver_version = Some(version.into()))
    }

    #[test]
    fn each_branch_says_what_it_can() {
        for (version, want) in [
            ("470.256.02", "error 470.256.02 (CUDA 13.0) cannot checkpoint"),
            ("545.29.06", "error 545.29.06 (CUDA 13.0) cannot checkpoint"),
            (
                "570.86.15",
                "ok 570.86.15 (CUDA 13.0): checkpoints, does not restore onto other GPUs (needs \
                 580), does not keep IPC memory (needs 610)",
            ),
            (
                "580.159.04",
                "ok 580.159.04 (CUDA 13.0): checkpoints, restores onto other GPUs, does not keep \
                 IPC memory (needs 610)",
            ),
            (
                "610.10",
                "ok 610.10 (CUDA 13.0): checkpoints, restores onto other GPUs, keeps IPC memory in \
                 a job",
            ),
        ] {
            assert_eq!(of_version(version), want);
        }
    }

    #[test]
    fn the_library_has_the_last_word() {
        assert_eq!(
            of(|f| f.missing = vec!["cuCheckpointProcessLock".into()]),
            "error 580.159.04 (CUDA 13.0): its libcuda does not have cuCheckpointProcessLock (needs 570)"
        );
        assert_eq!(
            of(|f| f.checkpoint_api = false),
            "error 580.159.04 (CUDA 13.0): its libcuda does not have the checkpoint API (needs 570)"
        );
        assert_eq!(
            of(|f| (f.driver_version, f.cuda_version) = (None, 12080)),
            "warning of unknown version (CUDA 12.8): can checkpoint; NVML does not tell the version"
        );
        assert!(of(|f| (f.driver_version, f.checkpoint_api) = (None, false)).starts_with("error "));
        assert!(of_version("unknown").starts_with("warning "));
    }

    #[test]
    fn before_570_it_goes_by_nvidias_command() {
        let older = |version: &str, change: fn(&mut DriverFacts)| {
            of(|facts| {
                facts.driver_version = Some(version.into());
                change(facts);
            })
        };
        assert_eq!(
            older("565.57.01", |f| f.utility = Some("cuda-checkpoint".into())),
            "ok 565.57.01 (CUDA 13.0): checkpoints by cuda-checkpoint, does not restore onto other \
             GPUs (needs 580), does not keep IPC memory (needs 610)"
        );
        assert_eq!(
            older("550.163.01", |f| {
                f.utility = Some("cuda-checkpoint".into());
                f.toggles = true;
            }),
            "warning 550.163.01 (CUDA 13.0): checkpoints, but in one step with the lock, by NVIDIA's \
             command: a container is killed if that is refused or does not end in time (its driver can \
             be asked and unlocked from 555 on)"
        );
        assert_eq!(
            older("550.163.01", |f| {
                f.checkpoint_api = false;
                f.no_utility = Some("cuda-checkpoint is not there".into());
            }),
            "error 550.163.01 (CUDA 13.0): its libcuda does not have the checkpoint API (needs 570); \
             NVIDIA's command, which can from 550 on, is of no use: cuda-checkpoint is not there"
        );
    }

    #[test]
    fn a_part_of_the_gpus_needs_575() {
        let two = |version: &str| {
            of(|f| {
                f.driver_version = Some(version.into());
                f.gpus.push(f.gpus[0].clone());
            })
        };
        assert!(two("570.86.15").starts_with("warning 570.86.15 (CUDA 13.0): only containers"));
        assert!(two("575.51.03").starts_with("warning "));
        assert!(two("575.57.08").starts_with("ok "));
    }

    #[test]
    fn arm_needs_595() {
        let arm = Fake { arch: "aarch64", ..Fake::good() };
        assert_eq!(
            said(&version(&arm, &h200())),
            "error 580.159.04 (CUDA 13.0) cannot checkpoint on arm64"
        );
        let facts = DriverFacts { driver_version: Some("595.45".into()), ..h200() };
        assert!(said(&version(&arm, &facts)).starts_with("ok "));
    }

    #[test]
    fn no_driver_is_an_error() {
        let why = "no libcuda found: libcuda.so.1 (loader), /usr/local/nvidia/lib64/libcuda.so.1";
        let all = driver(&Fake::good(), &FakeDriver(Err(why.into())), &Config::default());
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].level, Level::Error);
        assert_eq!(all[0].message, why);
    }

    #[test]
    fn library_and_gpus_are_named() {
        let all = driver(&Fake::good(), &FakeDriver(Ok(h200())), &Config::default());
        assert_eq!(said(&all[1]), "ok /usr/lib/x86_64-linux-gnu/libcuda.so.1");
        assert_eq!(
            said(&all[2]),
            "ok NVIDIA H200 GPU-5d8c5b7e-8a3f-4b0e-9d5e-0c1f2a3b4c5d (143771 MiB)"
        );
        assert!(said(&gpus(&DriverFacts::default())).starts_with("warning "));
    }
}

//! Whether containers can have a job, in which CUDA processes keep the memory that they share.

use stasis_config::{AnnotationName, Config};

use super::driver::{DriverFacts, IPC};
use super::version::Version;
use super::{Check, Finding, Host};

const JOBS: Check = Check { id: "jobs", title: "jobs" };

/// Nobody needs a job who did not ask for one, so that there can be none is no failure.
pub(super) fn jobs(host: &dyn Host, facts: &DriverFacts, config: &Config) -> Finding {
    let least = config.jobs.minimum_driver;
    let need = format!("need a driver from branch {least} on (jobs.minimum-driver)");
    let known =
        facts.driver_version.as_deref().and_then(|name| Some((name, Version::parse(name)?)));
    let Some((name, version)) = known else {
        return JOBS.ok(format!("none: they {need}, and the version of this one is unknown"));
    };
    if version.major() < least {
        return JOBS.ok(format!("none: they {need}, this one is {name}"));
    }
    if !config.annotations.allow.contains(&AnnotationName::Job) {
        return JOBS.ok("those that containers bring along; annotations.allow has no \"job\"");
    }
    let utility = config.cuda.utility.as_path();
    let Some(path) = host.find(utility) else {
        return JOBS
            .warning(format!(
                "{} was not found, or cannot be executed, so containers with the annotation \
                 dev.stasis.job=file cannot be created",
                utility.display()
            ))
            .remedy(
                "install NVIDIA's cuda-checkpoint in PATH, or set cuda.utility in the \
                 configuration",
            );
    };
    if version.major() < IPC {
        return JOBS
            .warning(format!(
                "made with {}, but driver {name} does not keep shared memory (needs {IPC})",
                path.display()
            ))
            .remedy(format!(
                "update NVIDIA's driver to {IPC} or later, or set jobs.minimum-driver to it"
            ));
    }
    JOBS.ok(format!("made with {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::driver::tests::h200;
    use super::super::fake::{Fake, said};
    use super::*;

    fn of(host: &Fake, version: Option<&str>, change: impl FnOnce(&mut Config)) -> Finding {
        let facts = DriverFacts { driver_version: version.map(str::to_owned), ..h200() };
        let mut config = Config::default();
        change(&mut config);
        jobs(host, &facts, &config)
    }

    #[test]
    fn an_older_driver_is_told_and_no_failure() {
        // Also where the command is: it is older than the jobs that keep memory.
        for host in [Fake::good(), Fake::good().program("cuda-checkpoint")] {
            assert_eq!(
                said(&of(&host, Some("580.159.04"), |_| ())),
                "ok none: they need a driver from branch 610 on (jobs.minimum-driver), this one is \
                 580.159.04"
            );
        }
        assert_eq!(
            said(&of(&Fake::good(), None, |_| ())),
            "ok none: they need a driver from branch 610 on (jobs.minimum-driver), and the version \
             of this one is unknown"
        );
        assert!(
            said(&of(&Fake::good(), Some("620.1"), |c| c.jobs.minimum_driver = 630))
                .contains("from branch 630 on")
        );
    }

    #[test]
    fn the_command_must_be_there_and_executable() {
        let host = Fake::good();
        let finding = of(&host, Some("610.43.02"), |_| ());
        assert_eq!(
            said(&finding),
            "warning cuda-checkpoint was not found, or cannot be executed, so containers with the \
             annotation dev.stasis.job=file cannot be created"
        );
        assert!(finding.remedy.unwrap().contains("cuda.utility"));

        let host = host.program("cuda-checkpoint");
        assert_eq!(
            said(&of(&host, Some("610.43.02"), |_| ())),
            "ok made with /usr/bin/cuda-checkpoint"
        );
        let path = host.files.path().join("usr/bin/cuda-checkpoint");
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(said(&of(&host, Some("610.43.02"), |_| ())).starts_with("warning "));

        let elsewhere =
            |config: &mut Config| config.cuda.utility = "/usr/bin/iptables-restore".into();
        assert_eq!(
            said(&of(&host, Some("610.43.02"), elsewhere)),
            "ok made with /usr/bin/iptables-restore"
        );
    }

    #[test]
    fn who_allows_no_jobs_needs_no_command() {
        assert_eq!(
            said(&of(&Fake::good(), Some("610.43.02"), |config| config.annotations.allow.clear())),
            "ok those that containers bring along; annotations.allow has no \"job\""
        );
    }

    #[test]
    fn the_brave_are_told_what_they_risk() {
        let host = Fake::good().program("cuda-checkpoint");
        assert_eq!(
            said(&of(&host, Some("590.44.01"), |config| config.jobs.minimum_driver = 590)),
            "warning made with /usr/bin/cuda-checkpoint, but driver 590.44.01 does not keep shared \
             memory (needs 610)"
        );
    }
}

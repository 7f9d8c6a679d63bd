//! `stasis check`.

use std::cell::RefCell;
use std::process::ExitCode;

use stasis_config::{Config, manifest};

use crate::check::{self, DriverFacts, DriverInfo, System};
use crate::child::Program;
use crate::cuda::client::HelperDriver;
use crate::cuda::{Driver as _, Steps};

/// Checks this host.
pub(super) fn run(config: &Config, json: bool) -> ExitCode {
    let driver = Helper(RefCell::new(HelperDriver::new(Program::this(), &config.cuda)));
    let findings = check::run(&System::new(), &driver, config);
    let text = if json { check::render_json(&findings) } else { check::render_text(&findings) };
    if super::print(&text) == ExitCode::FAILURE {
        return ExitCode::FAILURE;
    }
    ExitCode::from(check::exit_code(&findings))
}

struct Helper(RefCell<HelperDriver>);

impl DriverInfo for Helper {
    fn driver(&self) -> Result<DriverFacts, String> {
        let facts = self.0.borrow_mut().facts().map_err(|error| error.to_string())?;
        Ok(DriverFacts {
            libcuda: facts.library,
            driver_version: facts.driver_version,
            cuda_version: facts.cuda_version,
            checkpoint_api: facts.missing.is_empty(),
            gpus: facts.gpus.into_iter().map(manifest::Gpu::from).collect(),
            missing: facts.missing,
            utility: facts.utility,
            no_utility: facts.no_utility,
            toggles: facts.steps == Steps::Toggle,
        })
    }
}

//! `ctr tasks exec` in containers, also in restored ones.

use anyhow::{Result, ensure};
use stasis_integration::case::Case;

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("in_a_container", in_a_container),
        Test::new("in_a_restored_container", in_a_restored_container),
    ]
}

fn in_a_container(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    works(case, &id)
}

fn in_a_restored_container(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.cycle(&id)?;
    works(case, &id)?;
    case.expect(&id, 102)
}

fn works(case: &Case, id: &str) -> Result<()> {
    let name = case.ctr().exec(id, "name", &["cat", "/proc/1/comm"])?;
    ensure!(name.trim() == "counter", "init is called {name:?}");
    case.ctr().fail(["tasks", "exec", "--exec-id", "status", id, "sh", "-c", "exit 3"])?;
    Ok(())
}

//! The workload whose processes share GPU memory, as who asks it sees it.

use anyhow::{Result, ensure};
use nix::unistd::Pid;

use crate::case::PORT;
use crate::udp;

/// The number before anybody was asked.
const FIRST: u64 = 100;

/// Several processes that add to one number in shared GPU memory, and tell it only if each of them
/// sees what all have added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    members: u64,
    number: u64,
}

impl Group {
    /// A group that nobody has asked.
    #[must_use]
    pub fn new(members: u64) -> Self {
        Self { members, number: FIRST }
    }

    /// Another process has joined.
    pub fn grow(&mut self) {
        self.members += 1;
    }

    /// Asks it, in the network namespace of its container's init.
    pub fn expect(&mut self, init: Pid) -> Result<()> {
        self.expect_at(init, PORT)
    }

    /// The same on another port.
    pub fn expect_at(&mut self, init: Pid, port: u16) -> Result<()> {
        self.answered(udp::ask(init, port)?)
    }

    /// It was asked and has answered this.
    pub fn answered(&mut self, answer: u64) -> Result<()> {
        self.number += self.members;
        let (number, members) = (self.number, self.members);
        ensure!(answer == number, "{members} processes said {answer} instead of {number}");
        Ok(())
    }
}

//! The network that CRIU locks while it dumps.
//!
//! CRIU puts a chain of its own, which drops everything, into the filter table of the container's
//! network namespace, and takes it away at the end. When it is killed, by the OOM killer for
//! example, the chain stays, and the container that "runs on" is cut off. runc leaves it there.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Stdio};

use crate::processes::Pid;
use crate::sys;

/// CRIU's name for its chain.
const CHAIN: &str = "CRIU";
/// A dump that is killed again and again leaves a jump each time.
const MOST: usize = 32;

/// Removes what a killed CRIU left behind in the network namespace of `init`. Does nothing where
/// nothing is, and in the host's own namespace, which CRIU does not lock as a whole.
pub(super) fn unlock(init: Pid) {
    let namespace = format!("/proc/{init}/ns/net");
    let same = match (std::fs::metadata(&namespace), std::fs::metadata("/proc/self/ns/net")) {
        (Ok(its), Ok(ours)) => its.ino() == ours.ino(),
        _ => true,
    };
    if same {
        return;
    }
    for tool in ["iptables", "ip6tables"] {
        let run = |arguments: &[&str]| {
            let Ok(namespace) = File::open(&namespace) else { return false };
            let mut command = Command::new(tool);
            command.args(["-w", "5"]).args(arguments);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            sys::enter_network(&mut command, namespace);
            command.status().is_ok_and(|status| status.success())
        };
        if !run(&["-L", CHAIN, "-n"]) {
            continue;
        }
        tracing::warn!(init, tool, "a killed CRIU had left the network locked");
        for hook in ["INPUT", "OUTPUT"] {
            let _ = (0..MOST).take_while(|_| run(&["-D", hook, "-j", CHAIN])).count();
        }
        let _ = run(&["-F", CHAIN]) && run(&["-X", CHAIN]);
    }
}

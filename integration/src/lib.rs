//! Tools of the end-to-end tests: everything is used from outside, as a user would.
//!
//! The tests run inside the lab (`integration/lab/enter`), where every process,
//! mount and cgroup ends with the run. [`case::Lab`] starts what all tests share,
//! [`case::Case`] is the fixture of one test.

pub mod bare;
pub mod bundle;
pub mod by_hand;
pub mod case;
pub mod cdi;
pub mod command;
pub mod containerd;
pub mod cri;
pub mod ctr;
pub mod docker;
pub mod events;
pub mod gpu;
pub mod image;
pub mod ipc;
pub mod leaks;
pub mod manual;
pub mod nerdctl;
pub mod overlay;
pub mod podman;
pub mod processes;
pub mod runtime;
pub mod seen;
pub mod shim;
pub mod site;
pub mod starvation;
pub mod suite;
pub mod task;
pub mod terminal;
pub mod udp;
pub mod wait;

//! NVML as the crate nvml-wrapper uses it.

mod common;

use common::{Machine, play_role};

#[test]
fn role() {
    play_role();
}

#[test]
fn nvml_tells_what_the_settings_say() {
    let machine = Machine::with("driver=580.1.2\ncuda=13010\nmemory=1073741824\n");
    let target = machine.target();
    let used = (4 << 20) + 8;
    let lines = machine.nvml();
    let uuid = "GPU-e05e1a7e-0000-0000-0000-000000000000";
    let expected = ["580.1.2", "13010", "1", uuid, "Emulated GPU", "0", "1073741824"];
    assert_eq!(lines[..7], expected);
    assert_eq!(lines[7..9], [used.to_string(), used.to_string()]);
    assert_eq!(lines[9..], [format!("{} Used({used})", target.pid)]);

    let pid = target.pid;
    machine.ask(&format!("lock {pid} 1000\ncheckpoint {pid}"));
    let lines = machine.nvml();
    assert_eq!(lines[7..], ["0", "0"], "a checkpointed process is not on the GPU");
}

#[test]
fn without_a_gpu_there_is_no_driver() {
    let machine = Machine::with("gpus=0\n");
    assert!(machine.nvml()[0].contains("driver"), "{:?}", machine.nvml());
    assert_eq!(machine.ask("init"), [100]);
}

#[test]
fn a_process_is_on_the_gpus_on_which_it_has_a_context() {
    let machine = Machine::with("gpus=2\nnames=Emulated GPU, Emulated B\n");
    let mut target = machine.target();
    let pid = target.pid;
    let used = (4 << 20) + 8;
    let seen = |gpu: u32| machine.nvml_of(gpu)[3..].to_vec();
    let uuid = |gpu: u32| format!("GPU-e05e1a7e-0000-0000-0000-{gpu:012}");
    let size = (8_u64 << 30).to_string();
    let line = format!("{pid} Used({used})");
    let bytes = used.to_string();
    assert_eq!(seen(0), [&uuid(0), "Emulated GPU", "0", &size, &bytes, &bytes, &line]);
    assert_eq!(seen(1), [&uuid(1), "Emulated B", "1", &size, "0", "0"]);
    assert_eq!(target.tell("context 1"), "0");
    assert_eq!(seen(1)[6..], [format!("{pid} Used(4)")]);
    assert_eq!(seen(0)[6..], [line]);
}

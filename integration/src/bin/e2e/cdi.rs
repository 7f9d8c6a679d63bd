//! GPUs by CDI, and what a container is given of a GPU when it is restored.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use serde_json::{Value, json};
use stasis_integration::bundle::Bundle;
use stasis_integration::case::{Case, Container, PORT};
use stasis_integration::cdi::Cdi;
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::gpu::Gpu;
use stasis_integration::runtime::Settings;
use stasis_integration::udp;

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("ctr_gpus", ctr_gpus),
        Test::new("by_visible_devices", by_visible_devices),
        Test::new("by_annotation", by_annotation),
        Test::new("by_device_nodes", by_device_nodes),
        Test::new("sources_of_another_host", sources_of_another_host),
        Test::new("other_numbers", other_numbers),
        Test::new("more_than_the_image", more_than_the_image),
        Test::new("hostile_image", hostile_image),
        Test::new("failed_restore", failed_restore),
        Test::new("legacy_hook", legacy_hook),
        Test::new("params_hook", params_hook),
    ]
    .into_iter()
    .chain(tests_of_clients())
    .collect()
}

/// Those of them that our shim is put through, too.
pub(crate) fn tests_of_clients() -> Vec<Test> {
    vec![Test::new("ctr_device", ctr_device), Test::new("ctr_restore", ctr_restore)]
}

/// A program in a restored container that opens the device and uses CUDA.
const USE_GPU: &str = "\
    : </dev/nvidia0 || exit 1
    rm -f /tmp/ready; counter --port 0 --ready /tmp/ready & pid=$!
    for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        [ ! -e /tmp/ready ] || { kill $pid; exit 0; }; sleep 0.2
    done
    echo no CUDA; kill $pid; exit 1";

/// `ctr run --gpus 0`. Up to containerd 2.2 ctr hands that to NVIDIA's old tool, whose mounts could
/// not be checkpointed; from 2.3 on it asks CDI (containerd#12514).
fn ctr_gpus(case: &Case) -> Result<()> {
    let mut counter = Container::counter(&[]).without_gpu();
    counter.options.extend(["--gpus".to_owned(), "0".to_owned()]);
    let id = case.new_id();
    let error = case.ctr().fail(case.run_arguments(&id, &["--detach"], &counter))?;
    let says = "exec: \"nvidia-container-cli\": executable file not found in $PATH";
    ensure!(error.contains(says), "{error}");
    Ok(())
}

/// `ctr run --device vendor/class=0`. ctr knows CDI's names from containerd 2.0 on
/// (containerd#8525).
fn ctr_device(case: &Case) -> Result<()> {
    let cdi = Cdi::install(case.name(), &case.gpu)?;
    let device = cdi.device();
    let mut counter = Container::counter(&[]).without_gpu();
    counter.options.extend(["--device".to_owned(), device.clone()]);
    if case.ctr().run(["--version"])?.contains(" 1.7.") {
        let id = case.new_id();
        let error = case.ctr().fail(case.run_arguments(&id, &["--detach"], &counter))?;
        let says = format!("error stating device path: stat {device}: no such file or directory");
        ensure!(error.contains(&says), "{error}");
        return Ok(());
    }
    let id = case.start(&counter)?;
    case.expect(&id, 101)?;
    for count in [102, 103] {
        case.cycle(&id)?;
        case.expect(&id, count)?;
        case.ctr().exec(&id, &format!("gpu-{count}"), &["sh", "-c", USE_GPU])?;
        ensure!(is_allowed(case.pid(&id)?, "c 10:229")?, "no rule for the device");
    }
    Ok(())
}

/// A container whose task is gone, the image of it, and a bundle to restore it into.
struct Ended<'a> {
    bundle: Bundle<'a>,
    image: std::path::PathBuf,
}

/// Starts a counter with a GPU, checkpoints it, and makes a fresh bundle for it.
fn ended<'a>(case: &'a Case<'_>) -> Result<Ended<'a>> {
    let id = case.start_counter(&[])?;
    let image = case.path("image");
    let exit = Checkpoint { image: Some(image.clone()), exit: true, ..Checkpoint::default() };
    case.checkpoint(&id, &exit)?;
    case.end_task(&id)?;
    let bundle = Bundle::new(case.ctr(), &case.runtime, &id, &case.path("bundle"))?;
    Ok(Ended { bundle, image })
}

impl Ended<'_> {
    fn edit(&self, edit: impl FnOnce(&mut Value)) -> Result<()> {
        let path = self.bundle.directory().join("config.json");
        let mut config = serde_json::from_slice(&fs::read(&path)?)?;
        edit(&mut config);
        Ok(fs::write(path, config.to_string())?)
    }

    /// Names a device in an annotation, which counts from now on.
    fn ask(&self, case: &Case, device: &str) -> Result<()> {
        case.set(&Settings::default().with("cdi", "visible-devices", "true"))?;
        self.edit(|config| config["annotations"]["cdi.k8s.io/test"] = json!(device))
    }

    fn config(&self) -> Result<String> {
        Ok(fs::read_to_string(self.bundle.directory().join("config.json"))?)
    }

    /// A restore that is refused, with these words, and leaves config.json as it was.
    fn refused(&mut self, words: &[&str]) -> Result<()> {
        let before = self.config()?;
        let error = match self.bundle.restore(&self.image) {
            Ok(_) => anyhow::bail!("restored without {words:?}"),
            Err(error) => format!("{error:#}"),
        };
        for word in words {
            ensure!(error.contains(word), "the error does not say {word:?}: {error}");
        }
        ensure!(self.config()? == before, "config.json was changed");
        Ok(())
    }

    /// Restores; the counter goes on with this number, and the GPU works for new processes.
    fn restore(&mut self, number: u64) -> Result<Pid> {
        let pid = self.bundle.restore(&self.image)?;
        let answer = udp::ask(pid, PORT)?;
        ensure!(answer == number, "the counter said {answer} instead of {number}");
        Ok(pid)
    }
}

/// Takes away all that a runtime of NVIDIA would have added at `create`, and does not for
/// `restore`.
fn strip(config: &mut Value) {
    let is_gpu = |path: &Value| {
        path.as_str().is_some_and(|path| path.contains("nvidia") || path.contains("libcuda"))
    };
    if let Some(mounts) = config["mounts"].as_array_mut() {
        mounts.retain(|mount| !is_gpu(&mount["destination"]));
    }
    if let Some(devices) = config["linux"]["devices"].as_array_mut() {
        devices.retain(|device| !is_gpu(&device["path"]));
    }
    if let Some(rules) = config["linux"]["resources"]["devices"].as_array_mut() {
        rules.retain(|rule| rule["major"] != 10 || rule["minor"] != 229);
    }
}

fn ask_by_variable(config: &mut Value, device: &str) {
    if let Some(env) = config["process"]["env"].as_array_mut() {
        env.push(json!(format!("NVIDIA_VISIBLE_DEVICES={device}")));
    }
}

/// Whether the devices hierarchy lets the container of a process use a device.
fn is_allowed(pid: Pid, device: &str) -> Result<bool> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let path = cgroups
        .lines()
        .find_map(|line| line.split_once(":devices:"))
        .context("no hierarchy of version 1 with devices")?
        .1;
    let list = fs::read_to_string(format!("/sys/fs/cgroup/devices{path}/devices.list"))?;
    Ok(list.lines().any(|line| line.starts_with(&format!("{device} "))))
}

/// As nvidia-container-runtime leaves it: config.json has nothing of a GPU but the image's
/// environment. Twice, each time with a fresh config.json.
fn by_visible_devices(case: &Case) -> Result<()> {
    let mut ended = ended(case)?;
    let cdi = Cdi::install(case.name(), &case.gpu)?;
    let fresh = |ended: &Ended<'_>| {
        ended.edit(|config| {
            strip(config);
            ask_by_variable(config, &cdi.device());
        })
    };
    fresh(&ended)?;
    // This host does not give GPUs for the variable.
    ended.refused(&[
        "/dev/nvidia0, which the new container's config.json does not give",
        "cdi.k8s.io/",
        "cdi.visible-devices = true",
        "not touched",
    ])?;
    case.set(&Settings::default().with("cdi", "visible-devices", "true"))?;
    for (number, image) in [(102, "second"), (103, "third")] {
        let pid = ended.restore(number)?;
        ended.bundle.exec(&["sh", "-c", USE_GPU])?;
        ensure!(is_allowed(pid, "c 10:229")?, "no rule for the device");
        ended.image = case.path(image);
        ended.bundle.checkpoint(&ended.image)?;
        fresh(&ended)?;
    }
    ended.restore(104)?;
    Ok(())
}

/// Named in an annotation, as NVIDIA's runtime takes it.
fn by_annotation(case: &Case) -> Result<()> {
    let mut ended = ended(case)?;
    ended.edit(strip)?;
    ended.refused(&["asks for no CDI device of this host"])?;
    let cdi = Cdi::install(case.name(), &case.gpu)?;
    ended.ask(case, &cdi.device())?;
    // An image's own annotation, where nobody gives GPUs by it.
    case.set(&Settings::default())?;
    ended.refused(&["asks for no CDI device of this host", "cdi.visible-devices = true"])?;
    ended.ask(case, "no.such/gpu=0")?;
    ended.refused(&["annotation cdi.k8s.io/test asks for no.such/gpu=0", "/etc/cdi"])?;
    ended.ask(case, &cdi.device())?;
    let pid = ended.restore(102)?;
    ended.bundle.exec(&["sh", "-c", USE_GPU])?;
    ensure!(is_allowed(pid, "c 10:229")?, "no rule for the device");
    Ok(())
}

/// Specifications that no other test sees. All emulated GPUs have the same device node, so who has
/// one could get the libraries of another.
fn own_directory(case: &Case) -> Result<std::path::PathBuf> {
    let directory = case.path("specifications");
    let list = format!("[\"/nonexistent\", \"{}\"]", directory.display());
    case.set(&Settings::default().with("cdi", "directories", &list))?;
    Ok(directory)
}

/// Only the device itself is given: its libraries come with it.
fn by_device_nodes(case: &Case) -> Result<()> {
    let mut ended = ended(case)?;
    let directory = own_directory(case)?;
    ended.edit(|config| {
        let (devices, rules) =
            (config["linux"]["devices"].clone(), config["linux"]["resources"].clone());
        strip(config);
        config["linux"]["devices"] = devices;
        config["linux"]["resources"] = rules;
    })?;
    ended.refused(&["libcuda.so.1", "device nodes"])?;
    let _cdi = Cdi::install_in(&directory, case.name(), &case.gpu)?;
    ended.restore(102)?;
    ended.bundle.exec(&["sh", "-c", USE_GPU])?;
    Ok(())
}

/// As `ctr containers restore` has it: the mounts of the host that made the image, whose driver
/// lies elsewhere.
fn sources_of_another_host(case: &Case) -> Result<()> {
    const THERE: &str = "/usr/lib/x86_64-linux-gnu/libcuda.so.999.1";
    let mut ended = ended(case)?;
    let directory = own_directory(case)?;
    ended.edit(|config| {
        for mount in config["mounts"].as_array_mut().into_iter().flatten() {
            if mount["destination"].as_str().is_some_and(|path| path.contains("libcuda")) {
                mount["source"] = json!(THERE);
            }
        }
    })?;
    ended.refused(&[&format!("from {THERE}, which config.json mounts and this host has not")])?;
    let _cdi = Cdi::install_in(&directory, case.name(), &case.gpu)?;
    ended.restore(102)?;
    ended.bundle.exec(&["sh", "-c", USE_GPU])?;
    let here = case.gpu.library().display().to_string();
    let config = ended.config()?;
    ensure!(config.contains(&here) && !config.contains(THERE), "{config}");
    Ok(())
}

/// The same with ctr itself: between checkpoint and restore the driver's files moved.
fn ctr_restore(case: &Case) -> Result<()> {
    let directory = own_directory(case)?;
    let there = case.path("libcuda.so.999.1");
    fs::copy(case.gpu.library(), &there)?;
    let mut counter = Container::counter(&[]).without_gpu();
    counter.options.extend(Gpu::behind(case.gpu.store(), &there).arguments());
    let id = case.start(&counter)?;
    case.expect(&id, 101)?;
    let image = format!("checkpoint/{id}:1");
    case.ctr().checkpoint_container(&id, &image)?;
    case.remove(&id)?;
    fs::remove_file(&there)?;
    let error = case.ctr().restore_fails(&id, &image)?;
    ensure!(error.contains("config.json mounts and this host has not"), "{error}");
    case.remove(&id)?;
    let _cdi = Cdi::install_in(&directory, case.name(), &case.gpu)?;
    case.ctr().restore(&id, &image)?;
    case.expect(&id, 102)?;
    case.ctr().exec(&id, "gpu", &["sh", "-c", USE_GPU])?;
    case.ctr().remove_image(&image)?;
    // And again: containerd still has the config.json of the other host.
    case.cycle(&id)?;
    case.expect(&id, 103)
}

/// The card has other numbers than where the image was made, as nvidia-uvm after each boot.
fn other_numbers(case: &Case) -> Result<()> {
    const NUMBERS: (u64, u64) = (10, 237);
    let mut ended = ended(case)?;
    let node = case.path("node");
    mknod(&node, SFlag::S_IFCHR, Mode::S_IRUSR, makedev(NUMBERS.0, NUMBERS.1))?;
    let mut cdi = Cdi::install(case.name(), &case.gpu)?;
    cdi.set_node(&node)?;
    ended.edit(strip)?;
    ended.ask(case, &cdi.device())?;
    let pid = ended.restore(102)?;
    let found = fs::symlink_metadata(format!("/proc/{pid}/root/dev/nvidia0"))?;
    ensure!(found.file_type().is_char_device(), "{found:?}");
    ensure!(found.rdev() == makedev(NUMBERS.0, NUMBERS.1), "its numbers are {}", found.rdev());
    ensure!(found.mode() & 0o7777 == 0o666, "its mode is {:o}", found.mode());
    ensure!(is_allowed(pid, "c 10:237")?, "no rule for the device");
    ensure!(!is_allowed(pid, "c 10:229")?, "a rule for the old device");
    let stat = ended.bundle.exec(&["stat", "-c", "%t:%T", "/dev/nvidia0"])?;
    ensure!(stat.trim() == "a:ed", "{stat}");
    Ok(())
}

/// This host's specification mounts a file more than that of the host that made the image.
fn more_than_the_image(case: &Case) -> Result<()> {
    let mut ended = ended(case)?;
    let mut cdi = Cdi::install(case.name(), &case.gpu)?;
    cdi.add_mount(Path::new("/bin/true"), "/usr/bin/nvidia-more")?;
    for (number, image) in [(102, "second"), (103, "third")] {
        ended.edit(strip)?;
        ended.ask(case, &cdi.device())?;
        ended.restore(number)?;
        ended.image = case.path(image);
        ended.bundle.checkpoint(&ended.image)?;
    }
    ended.restore(104)?;
    Ok(())
}

/// An image is asked what it needs and believed nothing: what it names is not given, and a
/// container that asks for no GPU gets none.
fn hostile_image(case: &Case) -> Result<()> {
    let mut ended = ended(case)?;
    let cdi = Cdi::install(case.name(), &case.gpu)?;
    ended.edit(strip)?;
    ended.refused(&["asks for no CDI device of this host"])?;
    ended.ask(case, &cdi.device())?;
    let manifest = ended.image.join("stasis.json");
    let good = fs::read_to_string(&manifest)?;
    for (list, path) in [
        ("gpu_mounts", "/etc/shadow"),
        ("gpu_devices", "/dev/sda"),
        ("gpu_devices", "/dev/nvidia1"),
        ("gpu_devices", "/dev/null"),
    ] {
        let mut bad: Value = serde_json::from_str(&good)?;
        bad[list].as_array_mut().context("no list")?.push(json!(path));
        fs::write(&manifest, bad.to_string())?;
        ended.refused(&[&format!("its processes use {path}, which"), "not touched"])?;
    }
    fs::write(&manifest, good)?;
    ended.restore(102)?;
    let config = ended.config()?;
    ensure!(!config.contains("/dev/sda") && !config.contains("/etc/shadow"), "{config}");
    Ok(())
}

/// A restore that fails after config.json was completed.
fn failed_restore(case: &Case) -> Result<()> {
    let mut ended = ended(case)?;
    let cdi = Cdi::install(case.name(), &case.gpu)?;
    ended.edit(strip)?;
    ended.ask(case, &cdi.device())?;
    case.gpu.faults(&["restore error:999"])?;
    ended.refused(&["cuda-restore", "killed"])?;
    case.gpu.heal()?;
    ended.restore(102)?;
    Ok(())
}

/// NVIDIA's hook of old mounts into the container behind config.json: a checkpoint tells how to
/// give GPUs instead, before it touches anything.
fn legacy_hook(case: &Case) -> Result<()> {
    let mounted = case.path("nvidia-smi");
    fs::write(&mounted, "")?;
    let at = "$rootfs/usr/bin/nvidia-smi";
    let mount = format!("touch {at}; mount --bind {} {at}", mounted.display());
    add_hook(case, &mount)?;
    let id = case.start_counter(&[])?;
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", case.pid(&id)?))?;
    ensure!(mounts.contains(" /usr/bin/nvidia-smi "), "the hook mounted nothing: {mounts}");
    let begun = case.runtime.runc_calls()?.len();
    let image = case.path("image");
    let to = Checkpoint { image: Some(image.clone()), ..Checkpoint::default() };
    let error = case.checkpoint_fails(&id, &to)?;
    for words in [
        "/usr/bin/nvidia-smi",
        "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        "mode = \"cdi\"",
        "/etc/nvidia-container-runtime/config.toml",
        "not touched",
    ] {
        // ctr prints the words of the runtime as Go quotes them.
        let quoted = words.replace('"', "\\\"");
        ensure!(error.contains(words) || error.contains(&quoted), "no {words:?} in {error}");
    }
    let calls = case.runtime.runc_calls()?.split_off(begun);
    ensure!(calls.iter().all(|call| !call.contains(" checkpoint ")), "{calls:?}");
    ensure!(!image.join("inventory.img").exists(), "there is an image");
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)
}

/// A hook of CDI: `nvidia-cdi-hook disable-device-node-modification` makes a tmpfs in the container
/// and binds a file of it over /proc/driver/nvidia/params. CRIU brings that back by itself.
fn params_hook(case: &Case) -> Result<()> {
    const PARAMS: &str = "/proc/version";
    let mount = format!(
        "at=$rootfs/run/nvidia-ctk-hook/0; mkdir -p $at; mount -t tmpfs tmpfs $at; \
         echo ModifyDeviceFiles: 0 >$at/nvct-params; \
         mount --bind $at/nvct-params $rootfs{PARAMS}; mount --make-rprivate $rootfs{PARAMS}"
    );
    add_hook(case, &mount)?;
    let id = case.start_counter(&[])?;
    let params = case.ctr().exec(&id, "before", &["cat", PARAMS])?;
    ensure!(params == "ModifyDeviceFiles: 0\n", "the hook mounted nothing: {params:?}");
    for count in [102, 103] {
        case.cycle(&id)?;
        case.expect(&id, count)?;
        let params = case.ctr().exec(&id, &format!("after-{count}"), &["cat", PARAMS])?;
        ensure!(params == "ModifyDeviceFiles: 0\n", "it is {params:?} after the restore");
    }
    Ok(())
}

/// Gives the containers of this test a prestart hook, at `create`, as NVIDIA's old runtime does.
/// It runs these commands in the container's mount namespace, whose root will be `$rootfs`.
fn add_hook(case: &Case, commands: &str) -> Result<()> {
    let hook = case.path("hook");
    script(
        &hook,
        &format!(
            "state=$(cat)\nvalue() {{ printf '%s' \"$state\" | tr ',{{}}' '\\n\\n\\n' | \
             sed -n \"s/^\\\"$1\\\": *\\\"\\{{0,1\\}}\\([^\\\"]*\\).*/\\1/p\"; }}\n\
             rootfs=$(value bundle)/rootfs\nexport rootfs\n\
             exec nsenter --target \"$(value pid)\" --mount sh -e -c '{commands}'\n"
        ),
    )?;
    let before_runc = format!(
        "case \" $* \" in *' create '*) sed -i '1s,^{{,{{\"hooks\":{{\"prestart\":\
         [{{\"path\":\"{}\"}}]}}\\,,' config.json;; esac",
        hook.display()
    );
    case.set(&Settings { before_runc, ..Settings::default() })
}

fn script(path: &Path, body: &str) -> Result<()> {
    let mut write = std::process::Command::new("sh");
    // By another process: this one may be forking, and a file that is open cannot be executed.
    write.args(["-c", "printf '#!/bin/sh\\n%s' \"$1\" >\"$0\" && chmod 755 \"$0\""]);
    write.arg(path).arg(body);
    stasis_integration::command::succeed(&mut write, std::time::Duration::from_secs(5)).map(drop)
}

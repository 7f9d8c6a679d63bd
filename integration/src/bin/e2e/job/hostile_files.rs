//! Job files that are none, or become something else: each is named, the container runs on, and no
//! file outside it is touched.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use stasis_integration::case::Case;
use stasis_integration::ipc::Group;
use stasis_integration::runtime::Settings;
use stasis_integration::{command, wait};

use super::bundles::{bringing, with_own_file};
use super::own::{Own, says};
use super::{KEEPS, OLD, VARIABLE};
use crate::Test;

const LIMIT: Duration = Duration::from_secs(60);
const SECRET: &str = "this stays as it is\n";

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("hostile_files_in_the_root", |case| replaced(case, "/var/job")),
        Test::new("hostile_files_on_a_tmpfs", |case| replaced(case, "/data/job")),
        Test::new("hostile_file_of_another", of_another),
        Test::new("hostile_names", names),
        Test::new("hostile_swaps", swapped),
    ]
}

/// A file of the host, which the container has at the same path.
fn secret(case: &Case<'_>, own: &Own<'_>) -> Result<PathBuf> {
    let secret = case.path("secret");
    fs::write(&secret, SECRET)?;
    own.bare.add_mount(&secret, &secret.to_string_lossy(), true)?;
    Ok(secret)
}

fn unharmed(secret: &Path) -> Result<()> {
    let content = fs::read_to_string(secret)?;
    ensure!(content == SECRET, "the file of the host is now {content:?}");
    Ok(())
}

type Put<'a> = &'a dyn Fn(&Path) -> Result<()>;

/// Members of a good job, whose file is replaced behind them.
fn replaced(case: &Case<'_>, path: &str) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = bringing(case, "a", path, "ipc 4")?;
    let secret = secret(case, &own)?;
    own.start()?;
    own.expect()?;
    let (at, kept) = (own.inside(path)?, own.inside(&format!("{path}.kept"))?);
    fs::rename(&at, &kept)?;
    let puts: [(&str, Put<'_>, &str); 8] = [
        ("nothing", &|_| Ok(()), "is not there"),
        ("a link to a file of the host", &|at| Ok(symlink(&secret, at)?), "symbolic link"),
        ("a link to itself", &|at| Ok(symlink(path, at)?), "symbolic link"),
        ("a directory", &|at| Ok(fs::create_dir(at)?), "is a directory"),
        ("a FIFO", &|at| Ok(mkfifo(at, Mode::S_IRWXU)?), "is a FIFO"),
        (
            "10 GiB",
            &|at| Ok(File::create(at)?.set_len(10 << 30)?),
            "has 10737418240 bytes, more than 67108864",
        ),
        ("a device", &|at| device(at), "is a device"),
        ("a link to a device", &|at| Ok(symlink("/dev/nvidia0", at)?), "symbolic link"),
    ];
    for (name, put, says_why) in puts {
        put(&at).with_context(|| name.to_owned())?;
        let error = own.refused(&case.path("image")).with_context(|| name.to_owned())?;
        says(&error, &["(ipc)", path, says_why, "not touched"]).with_context(|| name.to_owned())?;
        unharmed(&secret)?;
        if at.is_dir() && !at.is_symlink() {
            fs::remove_dir(&at)?;
        } else {
            let _ = fs::remove_file(&at);
        }
    }
    // One of another job: the driver says so.
    let copy = format!("cp \"${VARIABLE}\" {path}");
    own.exec(&["/bin/cuda-checkpoint", "--launch-job", "/bin/sh", "-c", &copy])?;
    let foreign = fs::read(&at)?;
    let error = own.refused(&case.path("image")).context("a foreign one")?;
    says(&error, &["(ipc)", "1 (CUDA_ERROR_INVALID_VALUE)"])?;
    ensure!(fs::read(&at)? == foreign, "the file of another job was written to");
    fs::rename(&kept, &at)?;
    own.checkpoint_and_end(&case.path("good"))?;
    own.restore(&case.path("good"))?;
    own.expect()?;
    own.delete()
}

fn device(at: &Path) -> Result<()> {
    let kind = nix::sys::stat::SFlag::S_IFCHR;
    let null = nix::sys::stat::makedev(1, 3);
    Ok(nix::sys::stat::mknod(at, kind, Mode::S_IRUSR | Mode::S_IWUSR, null)?)
}

/// The driver writes with the rights of root, so what the process may not write to is not used.
fn of_another(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let words = with_own_file("/data/job", "ipc 4");
    let mut own = Own::new(case, "a", &words.each_ref().map(String::as_str))?;
    own.as_user(1000)?;
    own.start()?;
    own.expect()?;
    let at = own.inside("/data/job")?;
    let image = case.path("image");
    for (uid, mode, usable) in [(0, 0o600, false), (1000, 0o400, false), (0, 0o666, true)] {
        chown(&at, Some(uid), Some(0))?;
        fs::set_permissions(&at, Permissions::from_mode(mode))?;
        if usable {
            own.checkpoint_as_far_as_criu(&image)?;
        } else {
            let error = own.refused(&image)?;
            let mode = format!("mode {mode:04o}");
            says(&error, &["(ipc)", "/data/job", "may not write to", &mode, "1000:1000"])?;
        }
    }
    own.delete()
}

/// Names that lead nowhere, in containers that an older driver has let begin with them.
fn names(case: &Case<'_>) -> Result<()> {
    let pipe = "cat /dev/zero | { cd /data; exec 9<&0 </dev/null; exec ipc 2; }";
    for (number, (value, program, why)) in [
        ("job", "cd /data; touch job; exec ipc 2", "absolute path"),
        ("/proc/self/fd/9", pipe, "is a FIFO"),
        ("/proc/self/fd/77", "exec ipc 2", "is not there"),
        ("/proc/77/fd/3", "exec ipc 2", "77"),
        ("/proc/self/fd/x", "exec ipc 2", "no descriptor"),
        ("/proc/self/exe", "exec ipc 2", "symbolic link"),
        ("/dev/nvidia0", "exec ipc 2", "is a device"),
        ("/../../../../../../etc/hostname", "exec ipc 2", "is not there"),
        ("/nonexistent/job", "exec ipc 2", "is not there"),
    ]
    .into_iter()
    .enumerate()
    {
        case.gpu.driver(OLD)?;
        let mut own = Own::new(case, &number.to_string(), &["/bin/sh", "-c", program])?;
        own.set(&format!("{VARIABLE}={value}"))?;
        own.group = Group::new(2);
        own.start()?;
        own.expect().with_context(|| value.to_owned())?;
        case.gpu.driver(KEEPS)?;
        let error = own.refused(&case.path("image")).with_context(|| value.to_owned())?;
        says(&error, &["(ipc)", value, why, "not touched"])?;
        own.delete()?;
    }
    Ok(())
}

/// The container swaps its file for a link to a file of the host, all the time or now and then. A
/// checkpoint and a restore refuse, or are good; the file stays what it was, and nothing hangs.
fn swapped(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    case.set(&Settings::default().impatient(5))?;
    let mut made = 0;
    let mut refused = 0;
    for number in 0..40 {
        let pause = if number % 2 == 0 { "" } else { "sleep 0.05;" };
        if swapping(case, number, pause)? {
            made += 1;
        } else {
            refused += 1;
        }
        if made >= 3 && refused >= 6 {
            return Ok(());
        }
    }
    bail!("{made} images and {refused} refusals: that is not what it looks like at random");
}

/// Whether there is an image.
fn swapping(case: &Case<'_>, number: u32, pause: &str) -> Result<bool> {
    let mut own = bringing(case, &number.to_string(), "/etc/job", "ipc 2")?;
    let secret = secret(case, &own)?;
    own.group = Group::new(2);
    own.start()?;
    own.expect()?;
    let [job, kept] = ["etc/job", "etc/kept"].map(|name| own.root().join(name));
    fs::hard_link(&job, &kept)?;
    let swap = format!(
        "(while :; do ln -sf {} /etc/new; mv -f /etc/new /etc/job; ln -f /etc/kept /etc/new; \
         mv -f /etc/new /etc/job; {pause} done) </dev/null >/dev/null 2>&1 &",
        secret.display()
    );
    own.exec(&["/bin/sh", "-c", &swap])?;
    let (image, at_checkpoint) = (case.path(&format!("image-{number}")), own.group);
    let mut checkpoint = own.checkpoint_call(&image, &["--leave-running"]);
    let finished = command::run(&mut checkpoint, LIMIT)?;
    unharmed(&secret)?;
    let made = finished.status.success();
    if !made {
        says(&finished.stderr, &["stasis: checkpoint of container", "(ipc)"])?;
    }
    // Its own doing: the driver may find the link in the middle of an operation.
    if made || !finished.stderr.contains("and was killed") {
        own.expect().with_context(|| finished.stderr.clone())?;
    }
    own.delete()?;
    if made && !pause.is_empty() {
        let mut last = None;
        let restored = wait::until("a restore between two swaps", LIMIT / 4, || {
            own.group = at_checkpoint;
            // The last swap may have left the link there; and what it swaps the placed one for has to
            // be as good.
            let _ = fs::remove_file(&job);
            fs::write(&kept, fs::read(image.join("stasis.job"))?)?;
            let restored = own.restore(&image);
            unharmed(&secret)?;
            let restored = restored.and_then(|()| own.expect());
            own.delete()?;
            Ok(restored.map_err(|error| last = Some(error)).ok())
        });
        restored.with_context(|| format!("{last:?}"))?;
    }
    Ok(made)
}

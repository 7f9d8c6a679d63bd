//! From a config.json as runtimes leave it to one that a restore can use.

use std::fs;

use serde_json::{Value, json};

use super::*;

const LIBRARY: &str = "/usr/lib/libcuda.so.1";

/// A host with a GPU, whose library lies elsewhere than in containers; and a bundle.
struct World {
    root: tempfile::TempDir,
    visible_devices: bool,
}

impl World {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        for directory in ["cdi", "bundle", "image"] {
            fs::create_dir(root.path().join(directory)).unwrap();
        }
        fs::write(root.path().join("libcuda.so.580.2"), "").unwrap();
        let world = Self { root, visible_devices: true };
        world.specification("gpu.json", &world.gpu());
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Whose card has the numbers of /dev/null, and a second node shared by all.
    fn gpu(&self) -> Value {
        let library = self.path("libcuda.so.580.2");
        json!({
            "cdiVersion": "0.6.0", "kind": "test.org/gpu",
            "devices": [{"name": "0", "containerEdits":
                {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/null"}]}}],
            "containerEdits": {
                "env": ["NOT=taken"],
                "hooks": [{"hookName": "createContainer", "path": "/bin/false"}],
                "deviceNodes": [{"path": "/dev/nvidia-uvm", "hostPath": "/dev/zero", "permissions": "rw"}],
                "mounts": [{"hostPath": library, "containerPath": LIBRARY, "options": ["ro", "rbind"]}],
            },
        })
    }

    fn specification(&self, name: &str, value: &Value) {
        fs::write(self.path("cdi").join(name), value.to_string()).unwrap();
    }

    fn config(&self, value: &Value) {
        fs::write(self.path("bundle/config.json"), value.to_string()).unwrap();
    }

    fn read(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("bundle/config.json")).unwrap()).unwrap()
    }

    fn bundle(&self) -> Bundle {
        let mut config = Config::default();
        config.cdi.directories = vec![self.path("cdi")];
        config.cdi.visible_devices = Some(self.visible_devices);
        Bundle::new(&self.path("bundle"), &config)
    }

    fn complete(&self, needs: &Manifest) -> Result<Spec, String> {
        self.bundle().complete(&self.path("image"), needs).map_err(|cause| cause.to_string())
    }
}

/// As NVIDIA's runtime leaves it for a restore: with nothing of a GPU.
fn bare() -> Value {
    json!({
        "ociVersion": "1.0.2", "root": {"path": "rootfs"}, "x-unknown": {"kept": 1.5},
        "process": {"cwd": "/", "user": {"uid": 0, "gid": 0},
            "env": ["NVIDIA_VISIBLE_DEVICES=test.org/gpu=0"]},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc", "x": 1}],
        "linux": {"resources": {"devices": [{"allow": false, "access": "rwm"}]}},
    })
}

/// The same for one that asks for a device by name.
fn asking() -> Value {
    let mut config = bare();
    config["annotations"] = json!({"cdi.k8s.io/test": "test.org/gpu=0"});
    config
}

fn needs(mounts: &[&str], devices: &[&str]) -> Manifest {
    let list = |paths: &[&str]| paths.iter().map(|&path| path.to_owned()).collect();
    Manifest { gpu_mounts: list(mounts), gpu_devices: list(devices), ..Manifest::default() }
}

fn a_gpu() -> Manifest {
    needs(&[LIBRARY], &["/dev/nvidia0", "/dev/nvidia-uvm"])
}

#[test]
fn a_container_that_asks_gets_all_and_nothing_else_is_changed() {
    let world = World::new();
    world.config(&asking());
    world.complete(&a_gpu()).unwrap();
    let mut want = asking();
    want["mounts"].as_array_mut().unwrap().push(json!({
        "destination": LIBRARY, "source": world.path("libcuda.so.580.2"), "type": "bind",
        "options": ["ro", "rbind"],
    }));
    want["linux"]["devices"] = json!([
        {"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3},
        {"path": "/dev/nvidia-uvm", "type": "c", "major": 1, "minor": 5},
    ]);
    want["linux"]["resources"]["devices"] = json!([
        {"allow": false, "access": "rwm"},
        {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
        {"allow": true, "type": "c", "major": 1, "minor": 5, "access": "rw"},
    ]);
    assert_eq!(world.read(), want);
    // Again it is complete.
    world.complete(&a_gpu()).unwrap();
    assert_eq!(world.read(), want);
}

#[test]
fn edits_are_made_once() {
    let world = World::new();
    world.config(&asking());
    world.complete(&a_gpu()).unwrap();
    let once = world.read();
    let registry = Registry::scan(&[world.path("cdi")]);
    let claims = Claims::of(&parse(&once).unwrap(), &registry, true);
    let mut twice = once.clone();
    let lack = Lack::default();
    edits::apply(&mut twice, &world.path("bundle"), &lack, &claims.entitled[0]).unwrap();
    assert_eq!(twice, once);
}

#[test]
fn a_failed_restore_leaves_the_file_as_it_was() {
    let world = World::new();
    let text = format!("{}\n\n", asking());
    fs::write(world.path("bundle/config.json"), &text).unwrap();
    let mut bundle = world.bundle();
    bundle.complete(&world.path("image"), &a_gpu()).unwrap();
    assert_ne!(fs::read_to_string(world.path("bundle/config.json")).unwrap(), text);
    bundle.put_back();
    bundle.put_back();
    assert_eq!(fs::read_to_string(world.path("bundle/config.json")).unwrap(), text);
}

#[test]
fn what_is_complete_is_not_touched_whatever_the_hosts_cdi_is_like() {
    let world = World::new();
    let mut config = asking();
    config["linux"]["devices"] =
        json!([{"path": "/dev/nvidia7", "type": "c", "major": 9, "minor": 9}]);
    world.config(&config);
    fs::write(world.path("cdi/broken.yaml"), "a: &a [*a]").unwrap();
    world.specification("again.json", &world.gpu());
    world.complete(&needs(&[], &["/dev/nvidia7"])).unwrap();
    assert_eq!(world.read(), config);
}

#[test]
fn the_variable_gives_only_where_the_host_says_so() {
    let mut world = World::new();
    world.visible_devices = false;
    world.config(&bare());
    let error = world.complete(&a_gpu()).unwrap_err();
    for words in [
        "its processes use /usr/lib/libcuda.so.1, /dev/nvidia0, /dev/nvidia-uvm, which",
        "asks for no CDI device",
        "an annotation cdi.k8s.io/",
        "cdi.visible-devices = true",
        "device nodes",
    ] {
        assert!(error.contains(words), "no {words:?} in {error}");
    }
    assert_eq!(world.read(), bare());
    world.visible_devices = true;
    world.complete(&a_gpu()).unwrap();
    assert_eq!(world.read()["linux"]["devices"].as_array().unwrap().len(), 2);
}

#[test]
fn own_nodes_complete_mounts_and_correct_the_nodes_that_are_named() {
    let mut world = World::new();
    world.visible_devices = false;
    let mut config = bare();
    config["linux"]["devices"] = json!([
        {"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3},
        // The number that nvidia-uvm had on the host of the image.
        {"path": "/dev/nvidia-uvm", "type": "c", "major": 250, "minor": 7},
    ]);
    config["linux"]["resources"]["devices"] = json!([
        {"allow": false, "access": "rwm"},
        {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "r"},
        {"allow": true, "type": "c", "major": 250, "minor": 7, "access": "r"},
    ]);
    world.config(&config);
    world.complete(&a_gpu()).unwrap();
    let found = world.read();
    assert_eq!(found["mounts"][1]["destination"], LIBRARY);
    assert_eq!(found["linux"]["devices"][1]["major"], 1);
    assert_eq!(
        found["linux"]["resources"]["devices"],
        json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "r"},
            {"allow": true, "type": "c", "major": 1, "minor": 5, "access": "r"},
        ])
    );
    // A node that is not named is not given.
    config["linux"]["devices"].as_array_mut().unwrap().pop();
    world.config(&config);
    let error = world.complete(&a_gpu()).unwrap_err();
    assert!(error.contains("use /dev/nvidia-uvm, which"), "{error}");
    assert!(error.contains("gives no more by test.org/gpu=0"), "{error}");
    assert_eq!(world.read(), config);
}

#[test]
fn a_source_of_another_host_is_replaced_and_one_that_is_there_stays() {
    let mut world = World::new();
    for (source, replaced) in [("/usr/lib/libcuda.so.570.1-none", true), ("/bin", false)] {
        let mut config = asking();
        let mount = json!({"destination": LIBRARY, "type": "bind", "source": source});
        config["mounts"].as_array_mut().unwrap().insert(0, mount);
        world.config(&config);
        world.complete(&a_gpu()).unwrap();
        let mounts = &world.read()["mounts"];
        assert_eq!(mounts.as_array().unwrap().len(), 2);
        let here = world.path("libcuda.so.580.2").display().to_string();
        assert_eq!(mounts[0]["source"], if replaced { here.as_str() } else { source });
    }
    world.visible_devices = false;
    let mut config = bare();
    config["mounts"] = json!([{"destination": LIBRARY, "type": "bind", "source": "/none"}]);
    world.config(&config);
    let error = world.complete(&needs(&[LIBRARY], &[])).unwrap_err();
    assert!(
        error.contains(
            "/usr/lib/libcuda.so.1 from /none, which config.json mounts and this host has not"
        ),
        "{error}"
    );
}

#[test]
fn an_image_gets_nothing_by_naming_it() {
    let world = World::new();
    world.config(&asking());
    for (mounts, devices) in [
        (&["/etc/shadow"][..], &[][..]),
        (&[], &["/dev/sda"]),
        (&[], &["/dev/nvidia1"]),
        (&["/proc"], &["/dev/null"]),
    ] {
        let named = needs(mounts, devices);
        let error = world.complete(&named).unwrap_err();
        let name = mounts.first().filter(|path| **path != "/proc").or(devices.first()).unwrap();
        assert!(error.contains(&format!("use {name}, which")), "{error}");
        assert_eq!(world.read(), asking(), "{error}");
    }
}

#[test]
fn a_broken_or_doubled_specification_is_named_where_it_is_needed() {
    let world = World::new();
    world.config(&asking());
    let mut broken = world.gpu();
    broken["containerEdits"]["mounts"][0]["containerPath"] = json!("/usr/../etc/shadow");
    world.specification("gpu.json", &broken);
    let error = world.complete(&a_gpu()).unwrap_err();
    for words in [
        "annotation cdi.k8s.io/test asks for test.org/gpu=0",
        "gpu.json cannot be used",
        "containerPath",
    ] {
        assert!(error.contains(words), "no {words:?} in {error}");
    }
    world.specification("gpu.json", &world.gpu());
    world.specification("twin.json", &world.gpu());
    let error = world.complete(&a_gpu()).unwrap_err();
    for words in ["gpu.json", "twin.json", "neither has precedence"] {
        assert!(error.contains(words), "no {words:?} in {error}");
    }
    assert_eq!(world.read(), asking());
}

#[test]
fn a_device_that_this_host_does_not_have_is_named_with_its_file() {
    let world = World::new();
    world.config(&asking());
    fs::remove_file(world.path("libcuda.so.580.2")).unwrap();
    let error = world.complete(&a_gpu()).unwrap_err();
    assert!(
        error.contains("CDI device test.org/gpu=0 of") && error.contains("gpu.json: mount of"),
        "{error}"
    );
    let link = world.path("link");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    let mut linked = world.gpu();
    linked["containerEdits"]["mounts"] = Value::Null;
    linked["devices"][0]["containerEdits"]["deviceNodes"][0]["hostPath"] = json!(link);
    world.specification("gpu.json", &linked);
    let error = world.complete(&a_gpu()).unwrap_err();
    assert!(error.contains("gpu.json") && error.contains("is no device"), "{error}");
    assert_eq!(world.read(), asking());
}

#[test]
fn a_device_that_is_broken_and_not_needed_does_not_hurt() {
    let world = World::new();
    let mut config = asking();
    config["annotations"]["cdi.k8s.io/other"] = json!("other.org/gpu=0, none.org/gpu=1");
    world.config(&config);
    let mut other = world.gpu();
    other["kind"] = json!("other.org/gpu");
    other["containerEdits"]["mounts"][0]["hostPath"] = json!("/nonexistent/library");
    other["containerEdits"]["mounts"][0]["containerPath"] = json!("/usr/lib/other.so");
    world.specification("other.json", &other);
    world.complete(&a_gpu()).unwrap();
    assert!(!world.read().to_string().contains("other.so"));
    // Where it is, it is told.
    let error = world.complete(&needs(&["/usr/lib/other.so"], &[])).unwrap_err();
    for words in ["CDI device other.org/gpu=0 of", "/nonexistent/library", "no CDI device none.org"]
    {
        assert!(error.contains(words), "no {words:?} in {error}");
    }
}

#[test]
fn rules_are_where_nothing_takes_them_back() {
    let world = World::new();
    let mut config = asking();
    let rule = |allow, major: Value| json!({"allow": allow, "type": "c", "major": major, "minor": 3, "access": "rwm"});
    let deny = json!({"allow": false, "access": "rwm"});
    for (rules, more) in [
        (json!([rule(true, json!(1)), deny]), 2),
        (json!([deny, rule(true, json!(1))]), 1),
        (json!([deny, rule(true, Value::Null)]), 2),
        (Value::Null, 2),
    ] {
        config["linux"]["resources"]["devices"] = rules.clone();
        world.config(&config);
        world.complete(&a_gpu()).unwrap();
        let found = world.read()["linux"]["resources"]["devices"].as_array().unwrap().clone();
        let before = rules.as_array().cloned().unwrap_or_default();
        assert_eq!(found[..before.len()], before[..]);
        assert_eq!(found.len(), before.len() + more, "{found:?}");
    }
}

#[test]
fn a_config_that_is_none_is_told() {
    let world = World::new();
    let mut odd = asking();
    odd["linux"]["devices"] = json!({"0": 1});
    world.config(&odd);
    let error = world.complete(&a_gpu()).unwrap_err();
    assert!(error.contains("config.json is not what"), "{error}");
}

#[test]
fn who_only_has_nodes_is_given_only_what_is_lacking_of_the_driver() {
    let mut world = World::new();
    world.visible_devices = false;
    fs::write(world.path("secret"), "").unwrap();
    // Another vendor's device, which nobody named; its node is one that the container has.
    let secret =
        |destination: &str| json!({"hostPath": world.path("secret"), "containerPath": destination});
    let other = json!({"cdiVersion": "0.6.0", "kind": "other.org/thing", "devices": [{
        "name": "x", "containerEdits": {
            "deviceNodes": [{"path": "/dev/thing", "hostPath": "/dev/full"}],
            "mounts": [secret("/secret"), secret("/lib/libnvidia-more.so")],
        },
    }]});
    world.specification("other.json", &other);
    let mut config = bare();
    config["linux"]["devices"] = json!([
        {"path": "/dev/nvidia0", "type": "c", "major": 1, "minor": 3},
        {"path": "/dev/mine", "type": "c", "major": 1, "minor": 7},
    ]);
    world.config(&config);
    // The image names what it would like, too.
    let error = world.complete(&needs(&[LIBRARY, "/secret"], &[])).unwrap_err();
    assert!(error.contains("use /secret, which"), "{error}");
    world.complete(&needs(&[LIBRARY], &[])).unwrap();
    let mounts = world.read()["mounts"].clone();
    let given: Vec<_> = mounts.as_array().unwrap().iter().map(|m| &m["destination"]).collect();
    assert_eq!(given, ["/proc", LIBRARY]);
}

#[test]
fn an_annotation_alone_gives_nothing() {
    let mut world = World::new();
    world.visible_devices = false;
    world.config(&asking());
    let error = world.complete(&a_gpu()).unwrap_err();
    assert!(error.contains("asks for no CDI device"), "{error}");
    assert_eq!(world.read(), asking());
}

#[test]
fn no_node_is_made_for_whoever_has_the_pid_now() {
    let world = World::new();
    let pid = i32::try_from(std::process::id()).unwrap();
    let start_time = start_time(pid).unwrap() + 1;
    let spec = parse(&bare()).unwrap();
    let result = world.bundle().make_nodes(ProcessId { pid, start_time }, &spec);
    assert!(matches!(result, Err(Cause::Gone)), "{result:?}");
}

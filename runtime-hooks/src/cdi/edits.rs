//! A CDI device's edits, made to a config.json.
//!
//! The text is edited as JSON and not as what is known of it, so that nothing that a newer
//! runtime knows is lost.

use std::path::Path;

use oci_spec::runtime::Mount as SpecMount;
use serde_json::{Value, json};

use super::CdiError;
use super::entitled::{Entitled, Right};
use super::lack::{Lack, missing_source, same_path};
use super::numbers::Numbers;
use super::registry::Found;
use super::specification::{DeviceNode, Mount};
use crate::spec::is_driver_path;

/// Makes the edits of a device that are not made yet. Who only has the device's nodes is given no
/// more than the driver's files that are lacking: nobody named the device.
pub(super) fn apply(
    config: &mut Value,
    bundle: &Path,
    lack: &Lack,
    entitled: &Entitled<'_>,
) -> Result<(), CdiError> {
    let Entitled { found, right } = entitled;
    let (own, shared) = (&found.device.container_edits, &found.specification.edits);
    let wanted = |mount: &&Mount| {
        *right == Right::Whole
            || (is_driver_path(&mount.container_path) && lack.has_mount(&mount.container_path))
    };
    for mount in own.mounts.iter().chain(&shared.mounts).filter(wanted) {
        add_mount(config, bundle, *found, mount)?;
    }
    let nodes = match right {
        Right::Whole => own.device_nodes.as_slice(),
        // They are how the device was recognised.
        Right::Mounts => &[],
    };
    for node in nodes.iter().chain(&shared.device_nodes) {
        add_node(config, *found, node, *right)?;
    }
    Ok(())
}

/// A list in config.json, made if it is not there.
fn list<'a>(config: &'a mut Value, path: &[&str]) -> Result<&'a mut Vec<Value>, CdiError> {
    let mut at = config;
    for key in path {
        let Value::Object(map) = at else { return Err(CdiError::Shape(path.join("."))) };
        at = map.entry(*key).or_insert(Value::Null);
        if at.is_null() {
            *at = json!({});
        }
    }
    if at.as_object().is_some_and(serde_json::Map::is_empty) {
        *at = json!([]);
    }
    at.as_array_mut().ok_or_else(|| CdiError::Shape(path.join(".")))
}

/// A mount that is there stays, unless this host does not have its source.
fn add_mount(
    config: &mut Value,
    bundle: &Path,
    found: Found<'_>,
    mount: &Mount,
) -> Result<(), CdiError> {
    let mounts = list(config, &["mounts"])?;
    let destination = Path::new(&mount.container_path);
    let present = mounts.iter_mut().rfind(|present| {
        let there = present.get("destination").and_then(Value::as_str);
        there.is_some_and(|there| same_path(Path::new(there), destination))
    });
    let works = present.as_deref().is_some_and(|present| {
        serde_json::from_value::<SpecMount>(present.clone())
            .is_ok_and(|present| missing_source(&present, bundle).is_none())
    });
    if works {
        return Ok(());
    }
    if let Err(error) = Path::new(&mount.host_path).metadata() {
        return Err(CdiError::of(found, format!("mount of {}: {error}", mount.host_path)));
    }
    let kind = if mount.kind.is_empty() { "bind" } else { &mount.kind };
    let new = json!({
        "destination": mount.container_path, "source": mount.host_path,
        "type": kind, "options": mount.options,
    });
    match present {
        Some(present) => *present = new,
        None => mounts.push(new),
    }
    Ok(())
}

/// A node that is there gets this host's numbers. One that is not is added for who may have all of
/// the device.
fn add_node(
    config: &mut Value,
    found: Found<'_>,
    node: &DeviceNode,
    right: Right,
) -> Result<(), CdiError> {
    let user = config.pointer("/process/user").cloned().unwrap_or_default();
    let devices = list(config, &["linux", "devices"])?;
    let present = devices.iter_mut().find(|device| {
        device
            .get("path")
            .and_then(Value::as_str)
            .is_some_and(|path| same_path(Path::new(path), Path::new(&node.path)))
    });
    if present.is_none() && right == Right::Mounts {
        return Ok(());
    }
    let here = Numbers::of_host(node).map_err(|reason| CdiError::of(found, reason))?;
    let old = present.as_deref().and_then(numbers);
    if old != Some(here) {
        let Numbers { kind, major, minor } = here;
        let mut new = json!({"path": node.path, "type": kind, "major": major, "minor": minor});
        // As the libraries of CDI do it: the node of a container that runs as a user is the user's.
        let owner = |given: Option<u32>, key: &str| {
            given.map(u64::from).or_else(|| user.get(key)?.as_u64().filter(|id| *id > 0))
        };
        for (key, value) in [
            ("fileMode", node.file_mode.map(u64::from)),
            ("uid", owner(node.uid, "uid")),
            ("gid", owner(node.gid, "gid")),
        ] {
            if let Some(value) = value {
                new[key] = json!(value);
            }
        }
        match present {
            Some(present) => *present = new,
            None => devices.push(new),
        }
    }
    if here.kind == 'p' {
        return Ok(());
    }
    let stale = old.filter(|old| *old != here && !devices.iter().any(|d| numbers(d) == Some(*old)));
    let access = if node.permissions.is_empty() { "rwm" } else { &node.permissions };
    let rules = list(config, &["linux", "resources", "devices"])?;
    let had = stale.and_then(|stale| {
        let at = rules.iter().position(|rule| is_rule(rule, stale))?;
        rules.remove(at).get("access").and_then(Value::as_str).map(str::to_owned)
    });
    match right {
        Right::Whole => allow(rules, here, access),
        // What it was allowed under the old numbers, and not more.
        Right::Mounts => {
            if let Some(had) = had {
                allow(rules, here, &had);
            }
        }
    }
    Ok(())
}

fn numbers(device: &Value) -> Option<Numbers> {
    serde_json::from_value(device.clone()).ok().map(|device| Numbers::of_spec(&device))
}

fn allows(rule: &Value) -> bool {
    rule.get("allow").and_then(Value::as_bool) == Some(true)
}

/// Whether a rule allows exactly this device.
fn is_rule(rule: &Value, numbers: Numbers) -> bool {
    let number = |key: &str| rule.get(key).and_then(Value::as_i64);
    let kind = rule.get("type").and_then(Value::as_str).and_then(|kind| kind.chars().next());
    allows(rule)
        && kind == Some(numbers.kind)
        && number("major") == Some(numbers.major)
        && number("minor") == Some(numbers.minor)
}

/// Allows a device at the end of the rules, where nothing takes it back, unless it is allowed
/// there already.
fn allow(rules: &mut Vec<Value>, numbers: Numbers, access: &str) {
    let in_force = rules.iter().rev().take_while(|rule| allows(rule));
    let already = in_force.filter(|rule| is_rule(rule, numbers)).any(|rule| {
        let given = rule.get("access").and_then(Value::as_str).unwrap_or_default();
        access.chars().all(|right| given.contains(right))
    });
    if !already {
        let Numbers { kind, major, minor } = numbers;
        rules.push(json!({
            "allow": true, "type": kind, "major": major, "minor": minor, "access": access,
        }));
    }
}

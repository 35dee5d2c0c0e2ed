//! The hotplug script, run as libxl runs it, with a store that is a folder.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/vif-ringfence");

const DEVICE: &str = "backend/vif/5/0";

/// `xenstore-write PATH VALUE...`, and `xenstore-read PATH`, on a folder.
const WRITE: &str = r#"#!/bin/sh
[ ! -e "$STORE/.refuse" ] || { echo 'xenstore-write: could not write path' >&2; exit 1; }
while [ $# -gt 0 ]; do
    mkdir -p "$STORE/$(dirname "$1")"
    printf %s "$2" >"$STORE/$1" || exit 1
    shift 2
done
"#;
const READ: &str = "#!/bin/sh\ncat \"$STORE/$1\" 2>/dev/null\n";

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let bench = Bench { dir: tempfile::tempdir().unwrap() };
        for (name, text) in
            [("xenstore-write", WRITE), ("xenstore-read", READ), ("logger", "#!/bin/sh\nexit 0\n")]
        {
            let path = bench.dir.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        bench
    }

    fn key(&self, name: &str) -> PathBuf {
        self.dir.path().join("store").join(DEVICE).join(name)
    }

    fn set(&self, name: &str, value: &str) {
        let path = self.key(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, value).unwrap();
    }

    fn get(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.key(name)).ok()
    }

    fn run(&self, shell: &str, arguments: &[&str], device: Option<&str>) -> Output {
        let path = format!("{}:/usr/bin:/bin", self.dir.path().display());
        let mut command = Command::new(shell);
        if shell.ends_with("busybox") {
            command.arg("sh");
        }
        command.arg(SCRIPT).args(arguments).env_clear().env("PATH", path);
        command.env("STORE", self.dir.path().join("store"));
        command.env("vif", "vif5.0").env("script", SCRIPT).env("XENBUS_TYPE", "vif");
        command.env("XENBUS_BASE_PATH", "backend");
        if let Some(device) = device {
            command.env("XENBUS_PATH", device);
        }
        command.output().unwrap()
    }
}

/// Those of the usual shells that are here; `sh` always is.
fn shells() -> impl Iterator<Item = &'static str> {
    ["/bin/sh", "/bin/dash", "/bin/bash", "/bin/busybox"]
        .into_iter()
        .filter(|s| Path::new(s).exists())
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_toolstack_is_told_that_the_interface_is_connected() {
    for shell in shells() {
        for command in ["online", "add"] {
            let bench = Bench::new();
            bench.set("state", "2");
            let output = bench.run(shell, &[command, "type_if=vif"], Some(DEVICE));
            assert!(output.status.success(), "{shell} {command}: {}", said(&output));
            assert_eq!(bench.get("hotplug-status").as_deref(), Some("connected"), "{shell}");
            assert_eq!(bench.get("hotplug-error"), None);
            assert_eq!(said(&output), "");
        }
    }
}

#[test]
fn what_goes_is_left_to_the_daemon_however_often_it_is_said() {
    for shell in shells() {
        let bench = Bench::new();
        for command in ["offline", "remove", "offline"] {
            let output = bench.run(shell, &[command, "type_if=vif"], Some(DEVICE));
            assert!(output.status.success(), "{}", said(&output));
        }
        assert_eq!(bench.get("hotplug-status"), None);
    }
}

#[test]
fn an_emulated_interface_is_left_alone() {
    let bench = Bench::new();
    bench.set("state", "2");
    let output = bench.run("/bin/sh", &["add", "type_if=tap"], Some(DEVICE));
    assert!(output.status.success() && said(&output).contains("left alone"), "{}", said(&output));
    assert_eq!(bench.get("hotplug-status"), None);
}

#[test]
fn a_device_that_is_not_there_is_an_error_that_the_toolstack_reads() {
    for (state, expected) in [(None, "no device at"), (Some("hello"), "no state that there is")] {
        let bench = Bench::new();
        state.iter().for_each(|state| bench.set("state", state));
        let output = bench.run("/bin/sh", &["online", "type_if=vif"], Some(DEVICE));
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(bench.get("hotplug-status").as_deref(), Some("error"));
        let error = bench.get("hotplug-error").unwrap();
        assert!(error.contains(expected), "{error}");
        assert!(said(&output).contains(&error));
    }
}

#[test]
fn a_store_that_refuses_is_said_and_ends_the_script() {
    let bench = Bench::new();
    bench.set("state", "2");
    fs::write(bench.dir.path().join("store/.refuse"), "").unwrap();
    let output = bench.run("/bin/sh", &["online", "type_if=vif"], Some(DEVICE));
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("does this domain own the device?"), "{}", said(&output));
}

#[test]
fn who_calls_it_in_another_way_is_told_and_nothing_is_written() {
    let calls: [(&[&str], Option<&str>, &str); 6] = [
        (&["online"], None, "XENBUS_PATH is not set"),
        (&["online"], Some("-x"), "no path of the store"),
        (&["online"], Some("backend/vif/5/0;reboot"), "no path of the store"),
        (&["online"], Some("backend/vbd/5/0"), "not a network interface"),
        (&[], Some(DEVICE), "no command"),
        (&["up; reboot"], Some(DEVICE), "unknown command"),
    ];
    for (arguments, device, expected) in calls {
        let bench = Bench::new();
        bench.set("state", "2");
        let output = bench.run("/bin/sh", arguments, device);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(said(&output).contains(expected), "{expected}: {}", said(&output));
        assert_eq!(bench.get("hotplug-status"), None);
    }
}

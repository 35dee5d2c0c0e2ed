//! Hotplug scripts of interfaces and disks, run as libxl runs them. A folder takes the place of the store.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/vif-ringfence");
const DISK_SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../dist/block-ringfence");

const DEVICE: &str = "backend/vif/5/0";
const DISK: &str = "/local/domain/0/backend/vbd/5/51712";

/// Scripts for `xenstore-write PATH VALUE...` and `xenstore-read PATH` on the folder.
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
    script: &'static str,
    /// Directory of the device's keys.
    device: &'static str,
}

impl Bench {
    fn new() -> Bench {
        Bench::of(SCRIPT, DEVICE)
    }

    fn disk() -> Bench {
        Bench::of(DISK_SCRIPT, DISK)
    }

    fn of(script: &'static str, device: &'static str) -> Bench {
        let bench = Bench { dir: tempfile::tempdir().unwrap(), script, device };
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
        self.dir.path().join("store").join(self.device.trim_start_matches('/')).join(name)
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
        self.command(shell, arguments, device).output().unwrap()
    }

    fn command(&self, shell: &str, arguments: &[&str], device: Option<&str>) -> Command {
        let path = format!("{}:/usr/bin:/bin", self.dir.path().display());
        let mut command = Command::new(shell);
        if shell.ends_with("busybox") {
            command.arg("sh");
        }
        command.arg(self.script).args(arguments).env_clear().env("PATH", path);
        command.env("STORE", self.dir.path().join("store"));
        command.env("vif", "vif5.0").env("script", self.script).env("XENBUS_TYPE", "vif");
        command.env("XENBUS_BASE_PATH", "backend");
        if let Some(device) = device {
            command.env("XENBUS_PATH", device);
        }
        command
    }
}

/// Returns the usual shells that are installed, and `sh` in any case.
fn shells() -> impl Iterator<Item = &'static str> {
    ["/bin/sh", "/bin/dash", "/bin/bash", "/bin/busybox"]
        .into_iter()
        .filter(|s| Path::new(s).exists())
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn online_of_interface_reports_connected() {
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
fn repeated_offline_of_interface_changes_nothing() {
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
fn emulated_interface_is_ignored() {
    let bench = Bench::new();
    bench.set("state", "2");
    let output = bench.run("/bin/sh", &["add", "type_if=tap"], Some(DEVICE));
    assert!(output.status.success() && said(&output).contains("left alone"), "{}", said(&output));
    assert_eq!(bench.get("hotplug-status"), None);
}

#[test]
fn missing_interface_is_reported_to_toolstack() {
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
fn refused_store_write_ends_script_with_error() {
    let bench = Bench::new();
    bench.set("state", "2");
    fs::write(bench.dir.path().join("store/.refuse"), "").unwrap();
    let output = bench.run("/bin/sh", &["online", "type_if=vif"], Some(DEVICE));
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("does this domain own the device?"), "{}", said(&output));
}

#[test]
fn wrong_arguments_are_refused_and_nothing_is_written() {
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

#[test]
fn add_of_disk_reports_connected_after_daemon_opened_it() {
    for shell in shells() {
        let bench = Bench::disk();
        bench.set("state", "2");
        bench.set("params", "/srv/a disk; reboot");
        let mut command = bench.command(shell, &["add"], Some(DISK));
        let script = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        bench.set("disk-status", "");
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(bench.get("hotplug-status"), None, "{shell}: the daemon is waited for");
        // The write replaces the value at once, as in a store.
        bench.set("disk-status.new", "open");
        fs::rename(bench.key("disk-status.new"), bench.key("disk-status")).unwrap();
        let output = script.wait_with_output().unwrap();
        assert!(output.status.success(), "{shell}: {}", said(&output));
        assert_eq!(bench.get("hotplug-status").as_deref(), Some("connected"), "{shell}");
        assert_eq!(bench.get("hotplug-error"), None);
        assert_eq!(bench.get("physical-device"), None, "it is no block device");
        assert_eq!(said(&output), "");
    }
}

#[test]
fn reason_of_unserved_disk_is_reported_to_toolstack() {
    for shell in shells() {
        let bench = Bench::disk();
        bench.set("state", "2");
        bench.set("disk-status", "/srv/a: No such file or directory (os error 2)");
        let output = bench.run(shell, &["add"], Some(DISK));
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(bench.get("hotplug-status").as_deref(), Some("error"));
        let error = bench.get("hotplug-error").unwrap();
        assert!(error.starts_with("/srv/a: No such file"), "{error}");
        assert!(said(&output).contains(&error));
    }
}

#[test]
fn add_of_disk_without_daemon_times_out() {
    let bench = Bench::disk();
    bench.set("state", "2");
    // The script's clock runs fast.
    let path = bench.dir.path().join("sleep");
    fs::write(&path, "#!/bin/sh\nexit 0\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let output = bench.run("/bin/sh", &["add"], Some(DISK));
    assert_eq!(output.status.code(), Some(1));
    assert!(bench.get("hotplug-error").unwrap().contains("does ringfence serve run"));
    assert_eq!(bench.get("hotplug-status").as_deref(), Some("error"));
}

#[test]
fn remove_of_disk_changes_nothing_and_missing_disk_is_error() {
    let bench = Bench::disk();
    assert!(bench.run("/bin/sh", &["remove"], Some(DISK)).status.success());
    assert_eq!(bench.get("hotplug-status"), None);
    let output = bench.run("/bin/sh", &["add"], Some(DISK));
    assert_eq!(output.status.code(), Some(1));
    assert!(bench.get("hotplug-error").unwrap().contains("no device at"));
}

#[test]
fn wrong_arguments_of_disk_script_are_refused_and_nothing_is_written() {
    let calls: [(&[&str], Option<&str>, &str); 6] = [
        (&["add"], None, "XENBUS_PATH is not set"),
        (&["add"], Some("-x"), "no path of the store"),
        (&["add"], Some("backend/vbd/5/51712$(reboot)"), "no path of the store"),
        (&["add"], Some("backend/vif/5/0"), "not a disk"),
        (&[], Some(DISK), "no command"),
        (&["online"], Some(DISK), "unknown command"),
    ];
    for (arguments, device, expected) in calls {
        let bench = Bench::disk();
        bench.set("state", "2");
        bench.set("disk-status", "open");
        let output = bench.run("/bin/sh", arguments, device);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(said(&output).contains(expected), "{expected}: {}", said(&output));
        assert_eq!(bench.get("hotplug-status"), None);
    }
}

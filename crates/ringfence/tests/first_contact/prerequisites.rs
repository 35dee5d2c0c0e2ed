//! Missing prerequisites: `run` prints one sentence with the command that helps. Each test takes the thing away in
//! namespaces of its own.

use crate::require;
use crate::support::needs::Need;
use crate::support::{Lab, MOMENT};

/// Runs a script as root of a new user namespace, in mount and PID namespaces of its own, and then `ringfence WORDS`.
/// Returns the only line on standard error.
fn line_without(lab: &Lab, taken_away: &str, words: &str, status: i32) -> String {
    line_of(lab, &format!("{taken_away}; exec {} {words}", lab.program()), status)
}

/// Runs a script as [`line_without`] does. Returns the only line on standard error.
fn line_of(lab: &Lab, script: &str, status: i32) -> String {
    let words =
        ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "sh", "-ec", script];
    let finished = lab.spawn(&words).finish(MOMENT);
    assert_eq!(finished.status, Some(status), "{}", finished.stderr);
    let lines: Vec<&str> = finished.stderr.lines().collect();
    assert_eq!(lines.len(), 1, "one line: {}", finished.stderr);
    assert!(lines[0].contains("`ringfence doctor`"), "{}", lines[0]);
    lines[0].to_owned()
}

/// Returns the line that `run` prints.
fn said_without(lab: &Lab, taken_away: &str) -> String {
    line_without(lab, taken_away, "run -q --uplink none -- true", 125)
}

#[test]
fn run_where_no_user_namespace_may_be_made_names_the_setting() {
    require!(Need::Guests);
    let lab = Lab::new();
    for setting in ["user.max_user_namespaces", "user.max_pid_namespaces"] {
        let path = format!("/proc/sys/{}", setting.replace('.', "/"));
        let said = said_without(&lab, &format!("echo 0 > {path}"));
        assert!(said.contains(&format!("`sysctl -w {setting}=10000`")), "{said}");
    }
}

#[test]
fn run_where_apparmor_restricts_namespaces_names_the_profile() {
    require!(Need::Guests, Need::Program("chroot", "coreutils"));
    let lab = Lab::new();
    // The kernel refuses user namespaces to a process whose root is not that of its mount namespace.
    let root = lab.file("root").to_str().unwrap().to_owned();
    let taken_away = format!(
        "mount -t tmpfs none /proc/sys/kernel; \
         echo 1 > /proc/sys/kernel/apparmor_restrict_unprivileged_userns; \
         mkdir {root}; mount --rbind / {root}; cd /"
    );
    let run = format!("{} run -q --uplink none -- true", lab.program());
    let said = line_of(&lab, &format!("{taken_away}; exec chroot {root} {run}"), 125);
    assert!(said.contains("kernel.apparmor_restrict_unprivileged_userns is 1"), "{said}");
    assert!(said.contains("`apparmor_parser -r /etc/apparmor.d/ringfence`"), "{said}");
}

#[test]
fn run_without_tun_device_names_the_driver() {
    require!(Need::Guests);
    let lab = Lab::new();
    let said = said_without(&lab, "mount -t tmpfs none /dev/net");
    assert!(
        said.contains("/dev/net/tun does not exist") && said.contains("modprobe tun"),
        "{said}"
    );
}

#[test]
fn run_with_closed_tun_device_names_its_mode() {
    require!(Need::Guests);
    let lab = Lab::new();
    // A node of another file system is none that may be opened.
    let said = said_without(
        &lab,
        "mount -t tmpfs none /dev/net; touch /dev/net/tun; mount --bind /dev/null /dev/net/tun; \
         mount -o remount,bind,nodev /dev/net/tun",
    );
    assert!(said.contains("chmod 0666 /dev/net/tun"), "{said}");
}

#[test]
fn pasta_without_namespaces_or_tun_device_names_the_remedy() {
    require!(Need::Guests);
    let lab = Lab::new();
    let pasta = "pasta --config-net -q -- true";
    let said = line_without(&lab, "echo 0 > /proc/sys/user/max_user_namespaces", pasta, 1);
    assert!(said.contains("`sysctl -w user.max_user_namespaces=10000`"), "{said}");
    let said = line_without(&lab, "mount -t tmpfs none /dev/net", pasta, 1);
    assert!(said.contains("modprobe tun"), "{said}");
}

#[test]
fn serve_without_xen_names_what_runs_without_it() {
    require!(Need::Guests);
    let lab = Lab::new();
    let directory = lab.file("serve").to_str().unwrap().to_owned();
    // A machine on Xen has these devices.
    let taken_away = "test ! -e /dev/xen || mount -t tmpfs none /dev/xen";
    let said = line_without(&lab, taken_away, &format!("serve --runtime-dir {directory}"), 125);
    assert!(said.contains("/dev/xen/"), "{said}");
}

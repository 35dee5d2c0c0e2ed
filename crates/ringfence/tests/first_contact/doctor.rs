//! `ringfence doctor`: states, remedies and exit status. Each test takes things away in namespaces of its own.

use std::time::Duration;

use crate::require;
use crate::support::needs::Need;
use crate::support::{Finished, Lab};
use serde_json::Value;

/// Time limit beside other tests: a guest starts and ends in it.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a script as root of a new user namespace, in mount, network and PID namespaces of its own, and then `words`.
fn finished_without(lab: &Lab, taken_away: &str, words: &str) -> Finished {
    let script = format!("{taken_away}; exec {words}");
    let mut command =
        vec!["unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork"];
    command.extend(["sh", "-ec", &script]);
    lab.spawn(&command).finish(LIMIT)
}

/// Report of `ringfence doctor --json`.
struct Report(Value);

impl Report {
    /// Returns the report after a script, and compares the exit status with it.
    fn without(lab: &Lab, taken_away: &str, wrapper: &str) -> Report {
        let words = format!("{wrapper} {} doctor --json", lab.program());
        Report::of(&finished_without(lab, taken_away, &words))
    }

    fn of(finished: &Finished) -> Report {
        let parsed = serde_json::from_str(&finished.stdout);
        let report: Value = parsed
            .unwrap_or_else(|error| panic!("{error}: {}{}", finished.stdout, finished.stderr));
        let expected = if report["run"] == true { 0 } else { 1 };
        assert_eq!(finished.status, Some(expected), "{report:#}");
        Report(report)
    }

    /// Checks the state of a prerequisite, and texts of its remedy.
    fn expect(&self, name: &str, state: &str, remedy: &[&str]) {
        let checks = self.0["checks"].as_array().unwrap();
        let row = checks.iter().find(|row| row["name"] == name);
        let row = row.unwrap_or_else(|| panic!("{name} is not in {:#}", self.0));
        assert_eq!(row["state"], state, "{row:#}");
        let enable = row["enable"].as_str().unwrap_or_default();
        assert!(remedy.iter().all(|text| enable.contains(text)), "{row:#}");
        assert_eq!(enable.is_empty(), ["ok", "n/a"].contains(&state), "{row:#}");
        assert!(!row["without"].as_str().unwrap().is_empty(), "{row:#}");
    }

    fn runs_guests(&self) -> bool {
        self.0["run"] == true
    }
}

/// Makes a directory of devices with those that a guest needs, and further ones.
fn own_devices(further: &str) -> String {
    format!(
        "mkdir /mnt/dev; mount -t tmpfs none /mnt/dev; mkdir /mnt/dev/net /mnt/dev/xen; \
         for node in null zero full random urandom tty net/tun; do \
         touch /mnt/dev/$node; mount --bind /dev/$node /mnt/dev/$node; done; {further}; \
         mount --rbind /mnt/dev /dev"
    )
}

/// Makes an empty directory of the namespace's own for [`own_devices`]. The program may lie below `/tmp`.
const OWN_PLACE: &str = "mount -t tmpfs none /mnt";

#[test]
fn table_fits_a_terminal_and_says_that_run_works() {
    require!(Need::Guests);
    let lab = Lab::new();
    let words = [lab.program(), "doctor"].join(" ");
    let finished = finished_without(&lab, "true", &words);
    assert_eq!(finished.status, Some(0), "{}{}", finished.stdout, finished.stderr);
    for line in finished.stdout.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(finished.stdout.ends_with("`ringfence run` works here.\n"), "{}", finished.stdout);
    // The end of the PID namespace kills the driver domain, whose socket may be left.
}

#[test]
fn missing_user_namespaces_are_named_with_their_setting() {
    require!(Need::Guests);
    let lab = Lab::new();
    let report = Report::without(&lab, "echo 0 > /proc/sys/user/max_user_namespaces", "");
    assert!(!report.runs_guests());
    report.expect("user-namespaces", "missing", &["`sysctl -w user.max_user_namespaces=10000`"]);
    report.expect("guest", "missing", &[]);
    assert_eq!(report.0["settings"]["user.max_user_namespaces"], "0");
}

#[test]
fn missing_and_closed_tun_device_is_named_with_its_remedy() {
    require!(Need::Guests);
    let lab = Lab::new();
    let report = Report::without(&lab, "mount -t tmpfs none /dev/net", "");
    assert!(!report.runs_guests());
    report.expect("user-namespaces", "ok", &[]);
    report.expect("tun", "missing", &["modprobe tun"]);
    // A node of another file system is none that may be opened.
    let closed = "mount -t tmpfs none /dev/net; touch /dev/net/tun; \
                  mount --bind /dev/null /dev/net/tun; mount -o remount,bind,nodev /dev/net/tun";
    let report = Report::without(&lab, closed, "");
    assert!(!report.runs_guests());
    report.expect("tun", "missing", &["chmod 0666 /dev/net/tun"]);
}

#[test]
fn guests_run_without_all_that_is_optional() {
    require!(
        Need::Guests,
        Need::Program("setpriv", "util-linux"),
        Need::Program("prlimit", "util-linux")
    );
    let lab = Lab::new();
    // A new network namespace lets nobody send echo requests.
    let taken_away = format!(
        "{OWN_PLACE}; {}; \
         mount -t tmpfs none /sys/fs/cgroup; mount -t tmpfs none /sys/kernel/mm; \
         mkdir /sys/kernel/mm/transparent_hugepage; \
         echo 'always [never]' > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        own_devices("true")
    );
    let wrapper =
        "setpriv --bounding-set=-net_bind_service prlimit --nofile=1024:1024 --memlock=65536:65536";
    let report = Report::without(&lab, &taken_away, wrapper);
    assert!(report.runs_guests(), "{:#}", report.0);
    report.expect("guest", "ok", &[]);
    report.expect("ping", "missing", &["sysctl -w net.ipv4.ping_group_range"]);
    report.expect("low-ports", "limited", &["sysctl -w net.ipv4.ip_unprivileged_port_start=0"]);
    report.expect("cgroup", "missing", &["systemd-run"]);
    report.expect("open-files", "limited", &["prlimit --nofile"]);
    report.expect("locked-memory", "limited", &["prlimit --memlock"]);
    report.expect("huge-pages", "missing", &["echo advise"]);
    report.expect("nbd", "missing", &["modprobe nbd"]);
    report.expect("vhost-net", "missing", &["modprobe vhost_net"]);
}

#[test]
fn provided_objects_are_ok_and_closed_ones_have_the_remedy_of_a_denial() {
    require!(Need::Guests);
    let lab = Lab::new();
    let closed = "touch /mnt/dev/nbd0 /mnt/dev/vhost-net; \
                  mount --bind /dev/null /mnt/dev/vhost-net; \
                  mount -o remount,bind,nodev /mnt/dev/vhost-net";
    let provided = format!(
        "{OWN_PLACE}; {}; echo '0 0' > /proc/sys/net/ipv4/ping_group_range; \
         mount -t tmpfs none /sys/kernel/mm; mkdir /sys/kernel/mm/transparent_hugepage; \
         echo 'always [advise]' > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        own_devices(closed)
    );
    let report = Report::without(&lab, &provided, "");
    assert!(report.runs_guests(), "{:#}", report.0);
    for name in ["ping", "low-ports", "huge-pages", "nbd"] {
        report.expect(name, "ok", &[]);
    }
    report.expect("vhost-net", "missing", &["chmod 0666 /dev/vhost-net"]);
}

#[test]
fn missing_devices_of_xen_have_their_modules_on_xen_alone() {
    require!(Need::Guests);
    let lab = Lab::new();
    let devices = ["xen-evtchn", "xen-gntdev", "xen-gntalloc", "xen-window", "xenstore"];
    // Without /sys the kernel does not say that there is no hypervisor.
    let on_xen = format!(
        "{OWN_PLACE}; {}; mount -t tmpfs none /sys; mkdir -p /sys/module/xen_netback",
        own_devices("true")
    );
    let report = Report::without(&lab, &on_xen, "");
    for name in &devices[..3] {
        report.expect(name, "missing", &[&format!("modprobe {name}")]);
    }
    report.expect("xen-window", "missing", &["modprobe ringfence-window"]);
    report.expect("xenstore", "missing", &["is xenstored running?"]);
    report.expect("xen-netback", "limited", &["rmmod xen-netback"]);
    if !std::path::Path::new("/sys/hypervisor/type").exists() {
        let report = Report::without(&lab, &format!("{OWN_PLACE}; {}", own_devices("true")), "");
        devices.iter().for_each(|name| report.expect(name, "n/a", &[]));
        report.expect("xen-netback", "ok", &[]);
    }
}

#[test]
fn seccomp_list_of_a_container_is_the_reason_for_missing_namespaces_and_io_uring() {
    require!(Need::Guests);
    let lab = Lab::new();
    // A guest with a list that refuses namespaces is such a container. Each guest's list refuses io_uring.
    let list = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["unshare"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}]}"#;
    std::fs::write(lab.file("list.json"), list).unwrap();
    let words = [lab.program(), "doctor", "--json"];
    let finished = lab.run("--seccomp list.json", &words).finish(LIMIT);
    let report = Report::of(&finished);
    assert!(!report.runs_guests());
    report.expect("user-namespaces", "missing", &["seccomp=unconfined"]);
    report.expect("io-uring", "missing", &["kernel.io_uring_disabled=0"]);
}

//! Prerequisites of the host: all that Ringfence uses and a host may lack.
//!
//! [`ALL`] is the one table. `ringfence doctor` checks each entry. Errors of other commands take the sentence with the
//! remedy from the same entry ([`Prerequisite::missing`], [`Prerequisite::denied`]). The crate that uses an object also
//! checks it; this module only has the texts.

/// End of a sentence about a prerequisite.
const DOCTOR: &str = "`ringfence doctor` shows what this host allows";

/// Object of the host, the functions that are left without it, and the commands that provide it.
#[derive(Debug, PartialEq, Eq)]
pub struct Prerequisite {
    /// Name in the JSON form.
    pub name: &'static str,
    /// Name in the table, at most [`TITLE_MAX`] characters.
    pub title: &'static str,
    /// Set if `ringfence run` starts no guest without it.
    pub is_required: bool,
    /// Device node, setting of sysctl(8) or file. Empty if there is no single one.
    pub object: &'static str,
    /// Functions that work without it.
    pub without: &'static str,
    /// Remedy if the object does not exist, or forbids what is needed.
    pub enable: &'static str,
    /// Remedy if the user lacks the permission. Empty if [`Prerequisite::enable`] is for both.
    pub permit: &'static str,
}

/// Maximum length of a title in characters.
pub const TITLE_MAX: usize = 21;

impl Prerequisite {
    /// Returns the sentence for an object that does not exist.
    #[must_use]
    pub fn missing(&self) -> String {
        with_doctor(&format!("{} does not exist: {}", self.object, self.enable))
    }

    /// Returns the sentence for an object that this user may not open.
    #[must_use]
    pub fn denied(&self) -> String {
        with_doctor(&format!(
            "{} cannot be opened: permission denied. {}",
            self.object,
            self.remedy_of_denial()
        ))
    }

    /// Returns the remedy if the user lacks the permission.
    #[must_use]
    pub fn remedy_of_denial(&self) -> &'static str {
        if self.permit.is_empty() { self.enable } else { self.permit }
    }
}

/// Adds the name of the command that checks all prerequisites to a sentence about one.
#[must_use]
pub fn with_doctor(sentence: &str) -> String {
    format!("{sentence}. {DOCTOR}")
}

/// Prerequisites in the order in which `ringfence doctor` prints them.
pub const ALL: [&Prerequisite; 18] = [
    &USER_NAMESPACES,
    &TUN,
    &GUEST,
    &PING,
    &LOW_PORTS,
    &CGROUP,
    &OPEN_FILES,
    &LOCKED_MEMORY,
    &HUGE_PAGES,
    &IO_URING,
    &NBD,
    &VHOST_NET,
    &XENSTORE,
    &XEN_EVTCHN,
    &XEN_GNTDEV,
    &XEN_GNTALLOC,
    &XEN_WINDOW,
    &XEN_NETBACK,
];

/// Start of a guest, with all that it needs.
pub const GUEST: Prerequisite = Prerequisite {
    name: "guest",
    title: "a guest starts",
    is_required: true,
    object: "",
    without: "`serve` and `attach`, on Xen",
    enable: "`ringfence run -v -- true` explains each step",
    permit: "",
};

/// User namespaces with their capabilities, which isolate every process of Ringfence.
pub const USER_NAMESPACES: Prerequisite = Prerequisite {
    name: "user-namespaces",
    title: "user namespaces",
    is_required: true,
    object: "",
    without: "`serve` and `attach`, on Xen",
    enable: "as root, see and raise the limits: `sysctl -a | grep namespaces`",
    permit: "a container must be started with `--security-opt seccomp=unconfined`, or the like",
};

/// Reason and remedy where root of a user namespace maps no ids into another one.
pub const ROOT_WITHOUT_SETFCAP: [&str; 2] = [
    "root of this user namespace lacks the capability CAP_SETFCAP, without which the kernel maps no id",
    "start it with the user's own id (bubblewrap: without `--uid 0`), or with its capabilities (bubblewrap: \
     `--cap-add ALL`; a container: `--cap-add SETFCAP`)",
];

/// Device of TAP interfaces.
pub const TUN: Prerequisite = Prerequisite {
    name: "tun",
    title: "TAP devices",
    is_required: true,
    object: "/dev/net/tun",
    without: "`passt`; disks of `serve` and `attach`",
    enable: "load the driver with `modprobe tun` (as root), or, in a container, hand the device in \
             (`--device /dev/net/tun`; bubblewrap: `--dev-bind /dev/net/tun /dev/net/tun`)",
    permit: "udev gives it mode 0666; where udev does not run, do so by hand: `chmod 0666 /dev/net/tun` (as root)",
};

/// ICMP sockets of ordinary users.
pub const PING: Prerequisite = Prerequisite {
    name: "ping",
    title: "ping",
    is_required: false,
    object: "net.ipv4.ping_group_range",
    without: "all but echo requests: `ping` reaches the router alone",
    enable: "as root: `sysctl -w net.ipv4.ping_group_range='0 2147483647'`",
    permit: "",
};

/// Ports of the host below 1024.
pub const LOW_PORTS: Prerequisite = Prerequisite {
    name: "low-ports",
    title: "ports below 1024",
    is_required: false,
    object: "net.ipv4.ip_unprivileged_port_start",
    without: "-p with a port of the host from 1024 on",
    enable: "as root: `sysctl -w net.ipv4.ip_unprivileged_port_start=0`",
    permit: "",
};

/// Cgroup below which a guest's cgroup with limits can be made.
pub const CGROUP: Prerequisite = Prerequisite {
    name: "cgroup",
    title: "cgroup for limits",
    is_required: false,
    object: "/sys/fs/cgroup",
    without: "`run` without --memory, --cpus and --pids",
    enable: "`systemd-run --user --scope -p Delegate=yes ringfence run …` (root: without --user; as a service: \
             `Delegate=yes`)",
    permit: "",
};

/// Limit of open files, which also bounds connections.
pub const OPEN_FILES: Prerequisite = Prerequisite {
    name: "open-files",
    title: "open files",
    is_required: false,
    object: "RLIMIT_NOFILE",
    without: "fewer connections at a time: each one needs a descriptor",
    enable: "as root: `prlimit --nofile=65536:65536 --pid $$`; for good: `LimitNOFILE=` or /etc/security/limits.conf",
    permit: "",
};

/// Limit of locked memory.
pub const LOCKED_MEMORY: Prerequisite = Prerequisite {
    name: "locked-memory",
    title: "locked memory",
    is_required: false,
    object: "RLIMIT_MEMLOCK",
    without: "all; io_uring registers no pages of disks, and a Xen guest has fewer grant windows",
    enable: "as root: `prlimit --memlock=536870912:536870912 --pid $$`; for good: `LimitMEMLOCK=` or \
             /etc/security/limits.conf",
    permit: "",
};

/// Huge pages for files in memory.
pub const HUGE_PAGES: Prerequisite = Prerequisite {
    name: "huge-pages",
    title: "huge pages for memfd",
    is_required: false,
    object: "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    without: "all; lent memory is in pages of 4 KiB",
    enable: "as root: `echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled`",
    permit: "",
};

/// System calls of io_uring.
pub const IO_URING: Prerequisite = Prerequisite {
    name: "io-uring",
    title: "io_uring",
    is_required: false,
    object: "kernel.io_uring_disabled",
    without: "all; threads serve disks, which is slower",
    enable: "as root: `sysctl -w kernel.io_uring_disabled=0`; a container must be started with \
             `--security-opt seccomp=unconfined`, or the like",
    permit: "",
};

/// Block devices at NBD servers.
pub const NBD: Prerequisite = Prerequisite {
    name: "nbd",
    title: "disks in /dev (nbd)",
    is_required: false,
    object: "/dev/nbd0",
    without: "disks at the Unix socket RINGFENCE_DISK0",
    enable: "load the driver with `modprobe nbd` (as root)",
    permit: "only root may make block devices",
};

/// Kernel worker of virtio-net.
pub const VHOST_NET: Prerequisite = Prerequisite {
    name: "vhost-net",
    title: "vhost-net",
    is_required: false,
    object: "/dev/vhost-net",
    without: "all but --link vhost",
    enable: "load the driver with `modprobe vhost_net` (as root)",
    permit: "Its group (usually kvm) may; or `chmod 0666 /dev/vhost-net` (as root)",
};

/// Functions that are left without a device of Xen.
const WITHOUT_XEN: &str = "`run`, `pasta`, `passt`: all but `serve` and `attach`";

/// Store of the toolstack.
pub const XENSTORE: Prerequisite = Prerequisite {
    name: "xenstore",
    title: "xenstore",
    is_required: false,
    object: "/dev/xen/xenbus",
    without: WITHOUT_XEN,
    enable: "In dom0, is xenstored running? In a guest, is /dev a devtmpfs? Run this as root",
    permit: "",
};

/// Returns the prerequisite that is a device of Xen.
macro_rules! xen_device {
    ($name:literal, $title:literal, $path:literal, $module:literal, $without:expr) => {
        Prerequisite {
            name: $name,
            title: $title,
            is_required: false,
            object: $path,
            without: $without,
            enable: concat!(
                "load the driver with `modprobe ",
                $module,
                "` (as root). If it is loaded, /dev is not a devtmpfs: make the node by its number in /proc/misc"
            ),
            permit: concat!(
                "Run this as root, or let its user have the node: `chown USER ",
                $path,
                "` (as root)"
            ),
        }
    };
}

/// Event channels of Xen.
pub const XEN_EVTCHN: Prerequisite =
    xen_device!("xen-evtchn", "Xen event channels", "/dev/xen/evtchn", "xen-evtchn", WITHOUT_XEN);
/// Access to granted pages, for a backend.
pub const XEN_GNTDEV: Prerequisite = xen_device!(
    "xen-gntdev",
    "Xen grants, backend",
    "/dev/xen/gntdev",
    "xen-gntdev",
    "all but `serve`"
);
/// Granting of pages, for a frontend.
pub const XEN_GNTALLOC: Prerequisite = xen_device!(
    "xen-gntalloc",
    "Xen grants, frontend",
    "/dev/xen/gntalloc",
    "xen-gntalloc",
    "all but `attach`"
);
/// Grant windows of the hypervisor.
pub const XEN_WINDOW: Prerequisite = xen_device!(
    "xen-window",
    "Xen grant windows",
    "/dev/ringfence-window",
    "ringfence-window",
    "all but mode `window` on Xen"
);

/// Absence of the kernel's network backend, which serves the same interfaces.
pub const XEN_NETBACK: Prerequisite = Prerequisite {
    name: "xen-netback",
    title: "no xen-netback",
    is_required: false,
    object: "/sys/module/xen_netback",
    without: "all but network interfaces of `serve`, which the kernel takes first",
    enable: "as root: `rmmod xen-netback; echo blacklist xen-netback >/etc/modprobe.d/ringfence.conf`",
    permit: "",
};

/// Setting of the kernel with a value that forbids namespaces.
#[derive(Debug, PartialEq, Eq)]
pub struct NamespaceSetting {
    /// Name, as sysctl(8) has it.
    pub name: &'static str,
    /// Value that forbids namespaces.
    pub forbids: &'static str,
    /// Value that permits them.
    pub permits: &'static str,
    /// Remedy that leaves the setting as it is, or nothing.
    other_remedy: &'static str,
}

/// Settings by which `unshare` fails.
pub const NAMESPACE_SETTINGS: [NamespaceSetting; 5] = [
    NamespaceSetting::new("kernel.unprivileged_userns_clone", "0", "1", ""),
    NamespaceSetting::new("user.max_user_namespaces", "0", "10000", ""),
    NamespaceSetting::new("user.max_pid_namespaces", "0", "10000", ""),
    NamespaceSetting::new("user.max_mnt_namespaces", "0", "10000", ""),
    NamespaceSetting::new("user.max_net_namespaces", "0", "10000", ""),
];

/// File in which AppArmor's profile of the command is installed.
pub const APPARMOR_PROFILE: &str = "/etc/apparmor.d/ringfence";

/// Setting by which a user namespace can be made but gives no capability (Ubuntu). A program with a profile that permits
/// `userns` is excepted.
pub const APPARMOR: NamespaceSetting = NamespaceSetting::new(
    "kernel.apparmor_restrict_unprivileged_userns",
    "1",
    "0",
    "load the profile of /usr/bin/ringfence (`apparmor_parser -r /etc/apparmor.d/ringfence`; the file is \
     dist/apparmor/ringfence in the sources), or for all programs: ",
);

impl NamespaceSetting {
    const fn new(
        name: &'static str,
        forbids: &'static str,
        permits: &'static str,
        other_remedy: &'static str,
    ) -> NamespaceSetting {
        NamespaceSetting { name, forbids, permits, other_remedy }
    }

    /// Returns the setting with its value if that forbids namespaces, and the remedy.
    #[must_use]
    pub fn obstacle(&self, value: &str) -> Option<(String, String)> {
        let NamespaceSetting { name, forbids, permits, other_remedy } = self;
        (value.trim() == *forbids).then(|| {
            (
                format!("{name} is {forbids}"),
                format!("as root: {other_remedy}`sysctl -w {name}={permits}`"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prerequisites_have_names_and_titles_of_their_own_and_all_texts() {
        for (number, entry) in ALL.iter().enumerate() {
            assert!(entry.title.chars().count() <= TITLE_MAX, "{}", entry.title);
            assert!(!entry.without.is_empty() && !entry.enable.is_empty(), "{}", entry.name);
            let first =
                ALL.iter().position(|other| other.name == entry.name || other.title == entry.title);
            assert_eq!(first, Some(number), "{}", entry.name);
        }
    }

    #[test]
    fn sentence_has_object_remedy_and_command() {
        let missing = TUN.missing();
        assert!(missing.starts_with("/dev/net/tun does not exist: load the driver"), "{missing}");
        assert!(TUN.denied().contains("denied. udev gives it"), "{}", TUN.denied());
        assert_eq!(PING.remedy_of_denial(), PING.enable);
        for sentence in [missing, VHOST_NET.denied(), with_doctor("as root")] {
            assert!(
                sentence.ends_with(". `ringfence doctor` shows what this host allows"),
                "{sentence}"
            );
        }
    }

    #[test]
    fn setting_that_forbids_namespaces_has_a_command() {
        let [clone, max, ..] = &NAMESPACE_SETTINGS;
        let (problem, remedy) = clone.obstacle("0\n").unwrap();
        assert_eq!(problem, "kernel.unprivileged_userns_clone is 0");
        assert_eq!(remedy, "as root: `sysctl -w kernel.unprivileged_userns_clone=1`");
        assert_eq!(max.obstacle("127000\n"), None);
        assert_eq!(APPARMOR.obstacle("0\n"), None);
        let (_, remedy) = APPARMOR.obstacle("1\n").unwrap();
        assert!(remedy.contains(APPARMOR_PROFILE) && remedy.ends_with("=0`"), "{remedy}");
    }
}

//! Mounts of a guest's view that concern processes, names and kernel settings.

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ringfence_sys::namespaces;
use rustix::fs::StatVfsMountFlags;
use rustix::mount::{MountFlags, UnmountFlags};

use super::name_files::{MountedFile, SharedNameFiles};
use super::view::make_read_only;
use crate::config::GuestConfig;
use crate::{covers, files};

const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Directory that every system has. Files are written there before they are mounted elsewhere.
const SCRATCH: &str = "/proc";

/// Result of the mounts in the outer namespace.
#[derive(Debug)]
pub(crate) struct Mounted {
    /// Files about names that were replaced.
    pub name_files: Option<SharedNameFiles>,
    /// Set if programs query the guest's own DNS stub at its address. Otherwise they query
    /// 127.0.0.1, the default without a `resolv.conf`.
    pub resolver_is_ours: bool,
}

/// Replaces files of `/etc` and `/proc` in the outer mount namespace. Optional changes that fail
/// are left out with a remark.
pub(super) fn prepare(config: &GuestConfig, remarks: &mut Vec<String>) -> io::Result<Mounted> {
    let mut mounted = Mounted { name_files: None, resolver_is_ours: false };
    if config.names.is_some() || config.resolver.is_some() {
        with_scratch(|scratch| replace_files(config, scratch, &mut mounted, remarks))?;
        hide_name_cache(remarks);
    }
    if let Err(errno) = rustix::mount::mount("proc", "/proc", "proc", FLAGS, None) {
        remarks
            .push(format!("/proc shows the processes of outside: it cannot be mounted ({errno})"));
    }
    if config.view.is_host_root {
        protect_kernel()?;
    }
    Ok(mounted)
}

/// Calls `act` with a temporary directory for files that it binds elsewhere. The bound files
/// outlive it.
pub(super) fn with_scratch<T, E: From<io::Error>>(
    act: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    let scratch = Path::new(SCRATCH);
    rustix::mount::mount("ringfence", scratch, "tmpfs", FLAGS, Some(c"size=4m,mode=0755"))
        .map_err(io::Error::from)?;
    let done = act(scratch);
    super::view::detach(scratch)?;
    done
}

/// Creates the file that is mounted over hidden ones. No user can read it.
pub(super) fn hidden_file(scratch: &Path) -> io::Result<PathBuf> {
    let path = scratch.join("hidden");
    fs::File::options().create(true).append(true).mode(0o0).open(&path)?;
    Ok(path)
}

/// Makes `root` the root directory, with the host's `/dev` in it if `has_devices` is set.
pub(super) fn change_root(root: &Path, has_devices: bool) -> io::Result<()> {
    let proc = root.join("proc");
    if !proc.is_dir() {
        let why = format!(
            "it must have the directories /dev, /proc and /sys; {} is none",
            proc.display()
        );
        return Err(io::Error::new(io::ErrorKind::NotFound, why));
    }
    let tree = covers::detach_copy(root, true)?;
    let devices = covers::detach_copy(Path::new("/dev"), true)?;
    covers::attach(&tree, root)?;
    if has_devices {
        covers::attach(&devices, &root.join("dev"))?;
    }
    let sys = covers::detach_copy(Path::new("/sys"), true)?;
    covers::attach(&sys, &root.join("sys"))?;
    // Mount the new /proc before the host's is gone: the kernel requires a visible one.
    rustix::mount::mount("proc", &proc, "proc", FLAGS, None)?;
    std::env::set_current_dir(root)?;
    // The old root ends up mounted over the new one, topmost at `.` (pivot_root(2)).
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")
}

/// Files and directories of `/proc` through which root acts on the whole host. The kernel checks
/// only for user id 0, in whatever namespace.
const GLOBAL_KNOBS: [&str; 10] = [
    "/proc/sys",
    "/proc/sysrq-trigger",
    "/proc/irq",
    "/proc/bus",
    "/proc/fs",
    "/proc/mtrr",
    "/proc/driver",
    "/proc/acpi",
    "/proc/scsi",
    "/proc/tty",
];
/// Files of `/proc` that show root the memory and keys of others.
const GLOBAL_SECRETS: [&str; 4] =
    ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/latency_stats"];
/// Settings of the guest's own network namespace.
const NETWORK_KNOBS: &str = "/proc/sys/net";

/// Makes the kernel's settings read-only for a command that is root on the host.
///
/// The command cannot mount a writable `/proc` or `/sys`. The kernel allows a new one only in a
/// mount namespace that has one completely visible and writable (`mount_too_revealing`).
fn protect_kernel() -> io::Result<()> {
    let network = covers::detach_copy(Path::new(NETWORK_KNOBS), false)?;
    for path in GLOBAL_KNOBS.map(Path::new) {
        if path.exists() {
            make_read_only(path)?;
        }
    }
    covers::attach(&network, Path::new(NETWORK_KNOBS))?;
    for path in GLOBAL_SECRETS.map(Path::new) {
        if path.exists() {
            covers::cover_file(path, Path::new("/dev/null"))?;
        }
    }
    namespaces::make_tree_read_only(c"/sys")
}

/// Mounts the guest's own versions over the files of `/etc` that configure name lookup.
fn replace_files(
    config: &GuestConfig,
    scratch: &Path,
    mounted: &mut Mounted,
    remarks: &mut Vec<String>,
) -> io::Result<()> {
    let nsswitch = fs::read_to_string("/etc/nsswitch.conf").unwrap_or_default();
    let files = [
        ("resolv.conf", files::resolv_conf_for(config)),
        ("hosts", files::hosts(config, &[], &[])),
        ("nsswitch.conf", files::nsswitch(&nsswitch, config.names.is_some())),
    ];
    let (mut hosts, mut resolv_conf) = (None, None);
    for (name, text) in files {
        let target = Path::new("/etc").join(name);
        if !target.is_file() {
            remarks.push(format!("{} is not there, so it is not replaced", target.display()));
            continue;
        }
        let source = scratch.join(name);
        fs::write(&source, &text)?;
        let opened = || fs::File::options().write(true).open(&source);
        match rustix::mount::mount_bind(&source, &target) {
            Ok(()) if name == "resolv.conf" => {
                mounted.resolver_is_ours = true;
                resolv_conf = Some(MountedFile::new(opened()?, text));
            }
            Ok(()) if name == "hosts" => hosts = Some(MountedFile::new(opened()?, text)),
            Ok(()) => {}
            Err(errno) => remarks.push(format!("{} stays the host's: {errno}", target.display())),
        }
    }
    mounted.name_files = Some(SharedNameFiles::new(config, hosts, resolv_conf));
    Ok(())
}

/// Hides the sockets of the host's name cache daemon, which the C library queries first.
fn hide_name_cache(remarks: &mut Vec<String>) {
    for directory in ["/run/nscd", "/var/run/nscd"] {
        let hidden = || {
            let mounted =
                rustix::mount::mount("ringfence", directory, "tmpfs", FLAGS, Some(c"size=4k"));
            mounted.map_err(io::Error::from)
        };
        let is_there = Path::new(directory).join("socket").exists();
        if is_there && let Err(error) = hidden() {
            remarks.push(format!("{directory} cannot be hidden: {error}"));
        }
    }
}

/// Mounts a `/sys` of the network namespace just entered, with the previous cgroup hierarchy in it.
pub(super) fn mount_sys(is_host_root: bool) -> io::Result<()> {
    let cgroups = covers::detach_copy(Path::new("/sys/fs/cgroup"), true);
    // The kernel allows no writable one beside a read-only one, as `--ro /` makes it.
    let is_read_only = rustix::fs::statvfs("/sys")
        .is_ok_and(|facts| facts.f_flag.contains(StatVfsMountFlags::RDONLY));
    let mut flags = FLAGS;
    flags.set(MountFlags::RDONLY, is_host_root || is_read_only);
    rustix::mount::mount("sysfs", "/sys", "sysfs", flags, None)?;
    if let Ok(cgroups) = cgroups {
        covers::attach(&cgroups, Path::new("/sys/fs/cgroup"))?;
    }
    Ok(())
}

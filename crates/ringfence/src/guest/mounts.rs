//! A guest's view of the file system: the host's, but for what speaks of processes and networks.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

use super::{GuestConfig, files};

const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// A directory that every system has; files are written there before they are put in place.
const SCRATCH: &str = "/proc";

/// What came of it.
#[derive(Debug)]
pub(crate) struct Mounted {
    /// Whether programs will ask the guest's own DNS stub at its address: else they ask at
    /// 127.0.0.1, the default where there is no `resolv.conf`.
    pub(crate) resolver_is_ours: bool,
}

/// Makes the mounts, in a mount namespace just entered. What only makes a guest tidier is left
/// out where it cannot be had, with a remark.
pub(crate) fn prepare(config: &GuestConfig, remarks: &mut Vec<String>) -> io::Result<Mounted> {
    // What the host mounts later is seen; nothing of this goes the other way.
    let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", downstream)?;
    let mut mounted = Mounted { resolver_is_ours: false };
    if config.names.is_some() || config.resolver.is_some() {
        replace_files(config, &mut mounted, remarks)?;
        hide_name_cache(remarks);
    }
    if let Err(errno) = rustix::mount::mount("proc", "/proc", "proc", FLAGS, None) {
        remarks
            .push(format!("/proc shows the processes of outside: it cannot be mounted ({errno})"));
    }
    if let Err(error) = mount_sys() {
        remarks.push(format!("/sys shows the network of outside: it cannot be mounted ({error})"));
    }
    Ok(mounted)
}

/// Puts a guest's own versions over the files of `/etc` that decide how names are looked up.
fn replace_files(
    config: &GuestConfig,
    mounted: &mut Mounted,
    remarks: &mut Vec<String>,
) -> io::Result<()> {
    let nsswitch = fs::read_to_string("/etc/nsswitch.conf").unwrap_or_default();
    let resolv_conf = match (&config.names, &config.resolver) {
        (None, Some(resolver)) => files::resolv_conf_of_host(resolver),
        (_, others) => files::resolv_conf(others.as_ref()),
    };
    let files = [
        ("resolv.conf", resolv_conf),
        ("hosts", files::hosts(config)),
        ("nsswitch.conf", files::nsswitch(&nsswitch)),
    ];
    rustix::mount::mount("ringfence", SCRATCH, "tmpfs", FLAGS, Some(c"size=1m,mode=0755"))?;
    for (name, text) in files {
        let target = Path::new("/etc").join(name);
        if !target.is_file() {
            remarks.push(format!("{} is not there, so it is not replaced", target.display()));
            continue;
        }
        let source = Path::new(SCRATCH).join(name);
        fs::write(&source, text)?;
        match rustix::mount::mount_bind(&source, &target) {
            Ok(()) if name == "resolv.conf" => mounted.resolver_is_ours = true,
            Ok(()) => {}
            Err(errno) => remarks.push(format!("{} stays the host's: {errno}", target.display())),
        }
    }
    // The files live on in their new places.
    rustix::mount::unmount(SCRATCH, UnmountFlags::DETACH)?;
    Ok(())
}

/// The C library asks a name cache daemon first, by a socket in the file system: the host's.
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

/// A `/sys` that shows this network namespace, with the cgroups of the old one in it.
fn mount_sys() -> io::Result<()> {
    let cgroups = clone_tree("/sys/fs/cgroup");
    rustix::mount::mount("sysfs", "/sys", "sysfs", FLAGS, None)?;
    if let Ok(cgroups) = cgroups {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&cgroups, "", rustix::fs::CWD, "/sys/fs/cgroup", flags)?;
    }
    Ok(())
}

fn clone_tree(path: &str) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(rustix::mount::open_tree(rustix::fs::CWD, path, flags)?)
}

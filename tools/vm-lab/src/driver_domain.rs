//! Programs and kernel modules of a driver domain: a part of dom0's root file system ([`Part`]) with a part for guests,
//! `boot/driver-domain.cpio`. It has the toolstack's daemon (`xl devd`) and its own hotplug scripts with all that they run, a
//! packet filter, and the kernel's backend for comparisons.
//!
//! [`Part`]: super::parts::Part

use std::collections::BTreeSet;
use std::path::Path;

use super::apt::{Apt, Package};
use super::build::Build;
use super::cpio::Archive;
use super::images::{self, GUEST_MODULES, UTILITIES};
use super::kernel::{self, Modules, in_root};
use super::parts;

/// Packages beside the toolstack's. Their dependencies come with them.
const PACKAGES: [&str; 4] = ["bash", "iproute2", "nftables", "xenstore-utils"];
/// Modules beside those of every guest: what `xl` needs, the packet filter, and the kernel's backend.
const MODULES: [&str; 5] = ["xen-privcmd", "nft_ct", "nft_chain_nat", "nft_masq", "xen-netback"];
/// Directory of the hotplug scripts.
const SCRIPTS: &str = "etc/xen/scripts";

/// Returns the packages of the part.
pub(crate) fn packages(apt: &Apt) -> anyhow::Result<Vec<Package>> {
    let utilities = images::utilities(apt)?;
    let names: Vec<&str> = PACKAGES.into_iter().chain([utilities.as_str()]).collect();
    let mut packages = apt.closure(&names)?;
    packages.extend(apt.resolve(&images::kernel_packages(apt)?.1)?);
    Ok(packages)
}

/// Adds the part for guests to the archive. The packages are unpacked in `root`.
pub(crate) fn add(
    archive: &mut Archive<Vec<u8>>,
    build: &Build<'_>,
    apt: &Apt,
    root: &Path,
) -> anyhow::Result<()> {
    let utilities = images::utilities(apt)?;
    let xen = format!("xen-{}", utilities.trim_start_matches(UTILITIES));
    let mut guest = Archive::new(Vec::new());
    // busybox has its own programs of these names in /bin and /sbin, which the scripts search later.
    let programs = [
        (format!("usr/lib/{xen}/bin/xl"), "usr/lib/xen/bin/xl"),
        ("usr/bin/xenstore-read".to_owned(), "usr/bin/xenstore-read"),
        ("usr/bin/xenstore-write".to_owned(), "usr/bin/xenstore-write"),
        ("usr/sbin/nft".to_owned(), "usr/sbin/nft"),
        ("bin/bash".to_owned(), "bin/bash"),
        ("bin/ip".to_owned(), "usr/bin/ip"),
    ];
    let mut libraries = BTreeSet::new();
    for (from, to) in &programs {
        let from = in_root(root, from);
        guest.copy(to, &from)?;
        libraries.extend(parts::libraries_of(&from, root)?);
    }
    for library in libraries {
        guest.copy(&library, &root.join(&library))?;
    }
    // The scripts and libxl know the path of its build.
    guest.symlink(&format!("usr/lib/{xen}"), "xen")?;
    guest.tree(SCRIPTS, &root.join(SCRIPTS))?;
    let (release, _) = images::kernel_packages(apt)?;
    let folder = in_root(root, "lib/modules").join(&release);
    build.run(&kernel::unpack_modules(&folder).each_ref().map(String::as_str))?;
    let modules: Vec<&str> = GUEST_MODULES.iter().copied().chain(MODULES).collect();
    Modules::find(root, &release)?.add(&modules, &mut guest)?;
    Ok(archive.file("boot/driver-domain.cpio", false, &guest.finish()?)?)
}

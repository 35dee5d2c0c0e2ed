//! Images that the machines boot: Xen, a kernel, and root file systems in memory. They are made of Debian's
//! packages and kept until a package or the recipe in this module changes.
//!
//! | file | contents |
//! |---|---|
//! | `xen.elf` | the unpacked hypervisor, because QEMU's multiboot loader needs the ELF file |
//! | `vmlinux` | the unpacked kernel for dom0, and (inside `dom0.cpio`) for Xen's guests |
//! | `vmlinuz` | the packed kernel, for the machine without Xen |
//! | `dom0.cpio` | busybox, the toolstack, modules, and the guests' own `base.cpio` |
//! | `linux.cpio` | busybox and modules for the machine without Xen |
//!
//! The project's own files (init, scenarios, the program under test) are not in the images. Each boot appends
//! them ([`super::overlay`]), so a change of them needs no new images.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};
use taskkit::exec::Cmd;
use taskkit::tools::Toolbox;

use super::apt::{Apt, Package, Release};
use super::cpio::Archive;
use super::kernel::{self, LOADER, Modules, in_root};
use super::unavailable::Unavailable;

/// Packages for every machine and guest, without the kernel.
const COMMON: &[&str] = &["busybox-static"];
/// Packages of the ext4 tools, for dom0 and for guests with disks.
const DISK_TOOLS: &[&str] = &["e2fsprogs", "libcom-err2", "libblkid1"];
/// Programs of the ext4 tools, and their names in the machines: under the first names, busybox's shell runs its
/// own applets.
const DISK_PROGRAMS: &[(&str, &str)] = &[("mke2fs", "mkfs.ext4"), ("e2fsck", "fsck.ext4")];
/// Prefixes of the names of the ext4 tools' libraries.
const DISK_LIBRARIES: &[&str] =
    &["libext2fs.", "libe2p.", "libcom_err.", "libblkid.", "libuuid.", "libc.", "ld-linux"];
/// Packages of the toolstack's libraries for dom0. Packages with Xen's version in their names are added.
const TOOLSTACK: &[&str] = &[
    "xenstore-utils",
    "libxencall1",
    "libxendevicemodel1",
    "libxenevtchn1",
    "libxenforeignmemory1",
    "libxengnttab1",
    "libxenhypfs1",
    "libxenstore4",
    "libxentoolcore1",
    "libxentoollog1",
    "libyajl2",
    "libc6",
    "libgcc-s1",
    "libuuid1",
    "liblzma5",
    "libzstd1",
    "zlib1g",
];
/// Programs of the toolstack.
const PROGRAMS: &[&str] = &[
    "xl",
    "xenstored",
    "xenconsoled",
    "xenconsole",
    "xen-init-dom0",
    "libxl-save-helper",
    "lsevtchn",
    "xen-diag",
    "xenperf",
];
/// Modules of dom0. Only scenarios that compare with the kernel's own backends load these.
const DOM0_MODULES: &[&str] = &[
    "xenfs",
    "xen-privcmd",
    "xen-evtchn",
    "xen-gntdev",
    "xen-gntalloc",
    "xen-netback",
    "xen-blkback",
    "tun",
    "bridge",
    "veth",
    "dummy",
    "loop",
    "brd",
    "virtio_pci",
    "9pnet_virtio",
    "9p",
];
/// Modules of a guest under Xen.
pub(crate) const GUEST_MODULES: &[&str] = &[
    "xen-netfront",
    "xen-blkfront",
    "xen-evtchn",
    "xen-gntdev",
    "xen-gntalloc",
    "xenfs",
    "tun",
    "bridge",
    "veth",
    "nbd",
    "ext4",
    // ext4 requests this module by its function, not by its name.
    "crc32c_generic",
];
/// Modules of the machine without Xen.
const LINUX_MODULES: &[&str] = &[
    "tun",
    "veth",
    "bridge",
    "dummy",
    "nbd",
    "loop",
    "brd",
    "ext4",
    "crc32c_generic",
    "vhost_net",
    "vhost_vsock",
    "vfio-pci",
    "vfio_iommu_type1",
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "9pnet_virtio",
    "9p",
];

/// Directory of the images that a machine boots.
pub(crate) struct Images {
    folder: PathBuf,
}

impl Images {
    /// Returns the path of one file in the table above.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Makes the images of a release, by default this computer's, below `cache` unless they are there.
pub(crate) fn prepare(
    suite: Option<Release>,
    cache: &Path,
    toolbox: &Toolbox,
) -> anyhow::Result<Images> {
    std::fs::create_dir_all(cache)?;
    // Another process that holds the lock makes the images; this one then finds them complete.
    let lock = File::create(cache.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let images = Images { folder: cache.join("images") };
    let mut apt = Apt::of(suite, cache)?;
    let recipe = match apt.with_lists(download) {
        Ok(recipe) => recipe,
        Err(error) if error.is::<Unavailable>() && images.path("stamp").is_file() => {
            println!("{error}; the images made earlier serve");
            return Ok(images);
        }
        Err(error) => return Err(error),
    };
    let stamp = recipe.stamp();
    if std::fs::read_to_string(images.path("stamp")).is_ok_and(|made| made == stamp) {
        return Ok(images);
    }
    println!("unpacking {} packages and making the images", recipe.packages.len());
    let scratch = cache.join("scratch");
    let new = cache.join("images.new");
    for folder in [&scratch, &new, &images.folder] {
        if folder.exists() {
            std::fs::remove_dir_all(folder)?;
        }
    }
    std::fs::create_dir_all(&scratch)?;
    std::fs::create_dir_all(&new)?;
    recipe.packages.iter().try_for_each(|package| apt.unpack(package, &scratch))?;
    recipe.make(&scratch, &new, toolbox)?;
    std::fs::write(new.join("stamp"), stamp)?;
    std::fs::rename(&new, &images.folder)?;
    std::fs::remove_dir_all(&scratch)?;
    Ok(images)
}

/// Packages and versions that the images are made of.
struct Recipe {
    packages: Vec<Package>,
    /// Version of Linux: `6.1.0-31-amd64`.
    release: String,
    /// Version of Xen: `4.17`.
    xen: String,
}

/// Determines the packages and downloads them.
fn download(apt: &Apt) -> anyhow::Result<Recipe> {
    let hypervisor = first(apt, "xen-system-amd64", "xen-hypervisor-")?;
    let utilities = utilities(apt)?;
    let xen = utilities.trim_start_matches(UTILITIES).to_owned();
    let library = format!("libxenmisc{xen}");
    // Its name depends on the release.
    let ext2 = first(apt, &library, "libext2fs2")?;
    let mut names = vec![hypervisor, utilities, library, ext2];
    let (release, kernel) = kernel_packages(apt)?;
    names.extend(kernel);
    names.extend(COMMON.iter().chain(TOOLSTACK).chain(DISK_TOOLS).map(|name| (*name).to_owned()));
    let packages = apt.resolve(&names)?;
    apt.download(&packages)?;
    Ok(Recipe { packages, release, xen })
}

/// Prefix of the toolstack's package, before Xen's version.
pub(crate) const UTILITIES: &str = "xen-utils-";

/// Returns the name of the package of the toolstack.
pub(crate) fn utilities(apt: &Apt) -> anyhow::Result<String> {
    first(apt, "xen-system-amd64", UTILITIES)
}

/// Returns the version of the machines' Linux, and the names of its packages.
pub(crate) fn kernel_packages(apt: &Apt) -> anyhow::Result<(String, Vec<String>)> {
    let kernel = first(apt, "linux-image-amd64", "linux-image-")?;
    let release = kernel.trim_start_matches("linux-image-").to_owned();
    let mut names = vec![];
    // The package of a newer kernel has no files, and depends on those that do.
    for part in ["linux-base-", "linux-binary-", "linux-modules-"] {
        names.extend(apt.depends(&kernel, part)?);
    }
    names.push(kernel);
    Ok((release, names))
}

/// Returns the first dependency of the package `name` whose name starts with `prefix`.
fn first(apt: &Apt, name: &str, prefix: &str) -> anyhow::Result<String> {
    let found = apt.depends(name, prefix)?.into_iter().next();
    found.ok_or_else(|| {
        Unavailable(format!("apt knows no package {name}: this needs Debian 12 or later")).into()
    })
}

impl Recipe {
    /// Returns everything that the images depend on, as text. Images with an equal text are up to date.
    fn stamp(&self) -> String {
        let mut text = String::new();
        self.packages.iter().for_each(|package| text += &format!("{}\n", package.file));
        [
            text.as_str(),
            include_str!("images.rs"),
            include_str!("kernel.rs"),
            include_str!("cpio.rs"),
        ]
        .concat()
    }

    /// Makes every image from the unpacked packages in `root`.
    fn make(&self, root: &Path, images: &Path, toolbox: &Toolbox) -> anyhow::Result<()> {
        let hypervisor = root.join("boot").join(format!("xen-{}-amd64.gz", self.xen));
        std::fs::copy(&hypervisor, images.join("xen.elf.gz")).context("the hypervisor")?;
        let unzipped = Cmd::new("gzip").args(["--decompress", "xen.elf.gz"]).output(images)?;
        unzipped.map_err(|message| anyhow::anyhow!("gzip: {message}"))?;
        let modules = in_root(root, "lib/modules");
        // Newer packages have the kernel beside its modules.
        let places = [
            root.join("boot").join(format!("vmlinuz-{}", self.release)),
            modules.join(&self.release).join("vmlinuz"),
        ];
        let image = places.iter().find(|place| place.is_file()).context("no kernel's image")?;
        let image = std::fs::read(image)?;
        std::fs::write(images.join("vmlinuz"), &image)?;
        let kernel = kernel::unpack(&image, root, toolbox)?;
        std::fs::write(images.join("vmlinux"), &kernel)?;

        let [find, words @ ..] = kernel::unpack_modules(&modules);
        let unpacked = Cmd::new(find).args(words).env("PATH", toolbox.path()).output(root)?;
        unpacked.map_err(|message| anyhow::anyhow!("find, xz: {message}"))?;
        let modules = Modules::find(root, &self.release)?;
        let mut base = basics(Vec::new(), root)?;
        modules.add(GUEST_MODULES, &mut base)?;
        let base = base.finish()?;

        let mut dom0 = basics(create(&images.join("dom0.cpio"))?, root)?;
        modules.add(DOM0_MODULES, &mut dom0)?;
        self.toolstack(&mut dom0, root)?;
        dom0.file("boot/vmlinux", false, &kernel)?;
        dom0.file("boot/base.cpio", false, &base)?;
        disk_programs(&mut dom0, root)?;
        // Only guests that request it get this archive: each guest would have to unpack its MiBs.
        let mut tools = Archive::new(Vec::new());
        disk_programs(&mut tools, root)?;
        for folder in LIBRARIES {
            copy_names(&mut tools, root, folder, |name| {
                DISK_LIBRARIES.iter().any(|library| name.starts_with(library))
            })?;
        }
        tools.symlink("lib64/ld-linux-x86-64.so.2", &loader(root)?)?;
        dom0.file("boot/tools.cpio", false, &tools.finish()?)?;
        dom0.finish()?;

        let mut linux = basics(create(&images.join("linux.cpio"))?, root)?;
        modules.add(LINUX_MODULES, &mut linux)?;
        disk_programs(&mut linux, root)?;
        for folder in LIBRARIES {
            copy_names(&mut linux, root, folder, |name| {
                DISK_LIBRARIES.iter().any(|library| name.starts_with(library))
            })?;
        }
        linux.symlink("lib64/ld-linux-x86-64.so.2", &loader(root)?)?;
        linux.finish()?;
        Ok(())
    }

    /// Adds xl, its daemons and their libraries.
    fn toolstack<W: Write>(&self, archive: &mut Archive<W>, root: &Path) -> anyhow::Result<()> {
        let programs = format!("usr/lib/xen-{}/bin", self.xen);
        for program in PROGRAMS {
            archive
                .copy(&format!("usr/lib/xen/bin/{program}"), &root.join(&programs).join(program))?;
        }
        // libxl runs its helpers from the path of its build.
        archive.symlink(&format!("usr/lib/xen-{}", self.xen), "xen")?;
        copy_names(archive, root, "usr/bin", |name| name.starts_with("xenstore"))?;
        for folder in LIBRARIES {
            copy_names(archive, root, folder, |name| name.contains(".so"))?;
        }
        Ok(archive.symlink("lib64/ld-linux-x86-64.so.2", &loader(root)?)?)
    }
}

/// Directories of Debian's libraries.
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];

/// Returns the path of the loader in a machine.
fn loader(root: &Path) -> anyhow::Result<String> {
    let file = in_root(root, LOADER);
    anyhow::ensure!(file.is_file(), "libc6 has no {LOADER}");
    Ok(format!("/{}", file.strip_prefix(root)?.display()))
}

fn disk_programs<W: Write>(archive: &mut Archive<W>, root: &Path) -> anyhow::Result<()> {
    for (program, name) in DISK_PROGRAMS {
        archive.copy(&format!("usr/sbin/{name}"), &in_root(root, &format!("sbin/{program}")))?;
    }
    Ok(())
}

/// Starts an archive with busybox and the directories for its links and for mounts.
fn basics<W: Write>(out: W, root: &Path) -> anyhow::Result<Archive<W>> {
    let mut archive = Archive::new(out);
    for folder in [
        "proc", "sys", "dev", "run", "tmp", "sbin", "usr/bin", "usr/sbin", "var/log", "var/lib",
        "mnt",
    ] {
        archive.directory(folder)?;
    }
    archive.copy("bin/busybox", &in_root(root, "bin/busybox"))?;
    archive.symlink("bin/sh", "busybox")?;
    Ok(archive)
}

/// Copies the files of a directory whose names are `wanted`. Links stay links.
fn copy_names<W: Write>(
    archive: &mut Archive<W>,
    root: &Path,
    folder: &str,
    wanted: fn(&str) -> bool,
) -> anyhow::Result<()> {
    let Ok(entries) = std::fs::read_dir(root.join(folder)) else {
        return Ok(());
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let (path, kind) = (format!("{folder}/{name}"), entry.file_type()?);
        if !wanted(&name) || kind.is_dir() {
            continue;
        }
        if kind.is_symlink() {
            let target = std::fs::read_link(entry.path())?;
            archive.symlink(&path, &target.to_string_lossy())?;
        } else {
            archive.copy(&path, &entry.path())?;
        }
    }
    Ok(())
}

fn create(path: &Path) -> anyhow::Result<BufWriter<File>> {
    Ok(BufWriter::new(File::create(path).with_context(|| path.display().to_string())?))
}

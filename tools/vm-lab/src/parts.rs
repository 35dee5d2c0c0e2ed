//! Parts of dom0's root file system made of Debian packages, for scenarios with `# parts: NAME...`: foreign ends and tests.
//!
//! | name | contents |
//! |---|---|
//! | `qemu` | the release's QEMU for Xen where libxl starts it, and its libraries: the backend of `backendtype=qdisk` |
//! | `qemu-newest` | the one of Debian's backports, as `xen-qemu-newest` beside it |
//! | `grub` | GRUB as a guest's kernel, PV and PVH, below `/boot/grub-xen`; the packed kernel that GRUB hands over to, `/boot/vmlinuz` |
//! | `fio` | the release's fio and its libraries, for guests: `boot/fio.cpio` in dom0 |
//! | `selftests` | the kernel's tests of network drivers, for dom0 and for guests: see `selftests.rs` |
//! | `driver-domain` | `xl devd` with its hotplug scripts, a packet filter and xen-netback for guests: see `driver_domain.rs` |
//!
//! A part is kept until a package or this recipe changes.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::Cmd;
use taskkit::tools::{self, Tool};

use super::apt::{Apt, Package, Release};
use super::build::{self, Build, BuildTools};
use super::cpio::Archive;
use super::driver_domain;
use super::images::Images;
use super::kernel::{LOADER, in_root};
use super::module::NEEDS;
use super::selftests;

/// Path of QEMU in its package and in dom0, where libxl expects it.
const QEMU: &str = "usr/libexec/xen-qemu-system-i386";
/// Path of the newer QEMU in dom0.
const QEMU_NEWEST: &str = "usr/libexec/xen-qemu-newest";
/// Directory of QEMU's keyboard layouts, of which it reads one for each display, also for none.
const KEYMAPS: &str = "usr/share/qemu/keymaps";
const FIO: &str = "usr/bin/fio";
/// Directory of GRUB's images in their package.
const GRUB: &str = "usr/lib/grub-xen";
const LIBRARIES: [&str; 3] = [
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    // Those of fio's engine for Ceph's disks have a library of their own.
    "usr/lib/x86_64-linux-gnu/ceph",
];

/// Part that a scenario can request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Qemu,
    QemuNewest,
    Grub,
    Fio,
    Selftests,
    DriverDomain,
}

impl Part {
    pub(crate) const ALL: [Part; 6] =
        [Part::Qemu, Part::QemuNewest, Part::Grub, Part::Fio, Part::Selftests, Part::DriverDomain];

    /// Returns the name of the part in scenarios.
    fn name(self) -> &'static str {
        match self {
            Part::Qemu => "qemu",
            Part::QemuNewest => "qemu-newest",
            Part::Grub => "grub",
            Part::Fio => "fio",
            Part::Selftests => "selftests",
            Part::DriverDomain => "driver-domain",
        }
    }

    /// Returns the parts named in `words`.
    pub(crate) fn parse(words: &str) -> anyhow::Result<Vec<Part>> {
        let named = |word| Part::ALL.into_iter().find(|part| part.name() == word);
        let names = Part::ALL.map(Part::name).join(", ");
        let words = words.split_whitespace();
        words
            .map(|word| named(word).with_context(|| format!("`# parts: {word}`: {names}")))
            .collect()
    }

    /// Returns the sources of the recipe.
    fn recipe(self) -> String {
        let more = match self {
            Part::Selftests => include_str!("selftests.rs"),
            Part::DriverDomain => include_str!("driver_domain.rs"),
            Part::Qemu | Part::QemuNewest | Part::Grub | Part::Fio => "",
        };
        include_str!("parts.rs").to_owned() + more
    }

    /// Returns the programs that making the part needs.
    fn needs(self) -> Vec<&'static Tool> {
        match self {
            Part::Selftests => NEEDS.iter().chain(selftests::MORE).copied().collect(),
            Part::DriverDomain => vec![&tools::XZ],
            Part::Qemu | Part::QemuNewest | Part::Grub | Part::Fio => vec![],
        }
    }

    /// Makes the part below `cache`, or finds it there; returns its path.
    pub(crate) fn archive(
        self,
        suite: Option<Release>,
        images: &Images,
        cache: &Path,
        tools: BuildTools<'_>,
    ) -> anyhow::Result<PathBuf> {
        let name = self.name();
        let _lock = build::lock(cache, name)?;
        let mut apt = self.apt(suite, cache)?;
        let (built, stamp) =
            (cache.join(format!("{name}.cpio")), cache.join(format!("{name}.stamp")));
        let found = self.state(&apt.with_lists(|apt| self.packages(apt))?);
        if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == found) {
            return Ok(built);
        }
        // Old lists can also have packages that are found and not to be had.
        let packages = apt.with_lists(|apt| {
            let packages = self.packages(apt)?;
            apt.download(&packages)?;
            Ok(packages)
        })?;
        println!("unpacking {} packages for the part {name}", packages.len());
        let build = Build::begin(cache.join(name), &self.needs(), tools)?;
        let tree = build.folder().join("root");
        packages.iter().try_for_each(|package| apt.unpack(package, &tree))?;
        let mut archive = Archive::new(Vec::new());
        match self {
            Part::Qemu => {
                program(&mut archive, &tree, QEMU, QEMU)?;
                archive.tree(KEYMAPS, &tree.join(KEYMAPS))?;
            }
            Part::QemuNewest => program(&mut archive, &tree, QEMU, QEMU_NEWEST)?,
            Part::Grub => {
                archive.tree("boot/grub-xen", &tree.join(GRUB))?;
                archive.copy("boot/vmlinuz", &images.path("vmlinuz"))?;
            }
            Part::Fio => {
                let mut guest = Archive::new(Vec::new());
                program(&mut guest, &tree, FIO, FIO)?;
                archive.file("boot/fio.cpio", false, &guest.finish()?)?;
            }
            Part::Selftests => selftests::add(&mut archive, &build, &tree)?,
            Part::DriverDomain => driver_domain::add(&mut archive, &build, &apt, &tree)?,
        }
        std::fs::write(build.folder().join("part"), archive.finish()?)?;
        build.keep("part", &built)?;
        std::fs::write(&stamp, self.state(&packages))?;
        Ok(built)
    }

    /// Returns the text that changes with a package or the recipe.
    fn state(self, packages: &[Package]) -> String {
        let files = packages.iter().map(|package| package.file.as_str());
        files.collect::<Vec<_>>().join("\n") + &self.recipe()
    }

    fn apt(self, suite: Option<Release>, cache: &Path) -> anyhow::Result<Apt> {
        match self {
            Part::QemuNewest => Apt::backports(cache),
            Part::Qemu | Part::Grub | Part::Fio | Part::DriverDomain => Apt::of(suite, cache),
            Part::Selftests => selftests::apt(cache),
        }
    }

    /// Determines the packages: for programs also those of their libraries.
    fn packages(self, apt: &Apt) -> anyhow::Result<Vec<Package>> {
        match self {
            Part::Grub => apt.resolve(&["grub-xen-host".to_owned()]),
            Part::Qemu | Part::QemuNewest => apt.closure(&["qemu-system-xen"]),
            Part::Fio => apt.closure(&["fio"]),
            Part::Selftests => selftests::packages(apt),
            Part::DriverDomain => driver_domain::packages(apt),
        }
    }
}

/// Adds a program of the unpacked packages in `tree`, and the libraries that it needs, to the archive.
fn program(
    archive: &mut Archive<Vec<u8>>,
    tree: &Path,
    from: &str,
    to: &str,
) -> anyhow::Result<()> {
    archive.copy(to, &tree.join(from))?;
    for library in libraries_of(&tree.join(from), tree)? {
        archive.copy(&library, &tree.join(&library))?;
    }
    Ok(())
}

/// Returns the paths, relative to `tree`, of the libraries that a program of the packages in `tree` needs, and of their
/// loader.
pub(crate) fn libraries_of(program: &Path, tree: &Path) -> anyhow::Result<Vec<String>> {
    // The loader of the packages, so that the libraries of another release are found as well.
    let loader = in_root(tree, LOADER);
    let folders = LIBRARIES.map(|folder| tree.join(folder).display().to_string()).join(":");
    let words = ["--library-path", &folders, "--list"];
    let command = Cmd::new(loader).args(words).args([program]);
    let listed = command.output(tree)?;
    let listed = listed.map_err(|said| anyhow::anyhow!("{}: {said}", program.display()))?;
    // The loader lists itself, by the path in the program.
    let inside = |path: &str| Some(Path::new(path).strip_prefix(tree).ok()?.display().to_string());
    Ok(libraries(&listed).into_iter().filter_map(inside).collect())
}

/// Returns the paths in lines such as `libz.so.1 => /lib/libz.so.1 (0x00007f...)`.
fn libraries(listed: &str) -> Vec<&str> {
    let lines = listed.lines().filter_map(|line| line.split_once(" => "));
    lines.filter_map(|(_, path)| path.split_whitespace().next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_parsed_by_name() {
        assert_eq!(Part::parse("qemu grub").unwrap(), [Part::Qemu, Part::Grub]);
        assert_eq!(Part::parse("").unwrap(), []);
        let error = Part::parse("qemu lilo").unwrap_err().to_string();
        assert_eq!(
            error,
            "`# parts: lilo`: qemu, qemu-newest, grub, fio, selftests, driver-domain"
        );
    }

    #[test]
    fn libraries_are_read_from_list_of_loader() {
        let listed =
            "\tlinux-vdso.so.1 (0x1)\n\tlibz.so.1 => /t/lib/libz.so.1 (0x2)\n\t/lib64/ld (0x3)\n";
        assert_eq!(libraries(listed), ["/t/lib/libz.so.1"]);
    }
}

//! `cargo xtask xen`: a hypervisor with grant windows, from Debian's source package of Xen and the folder `xen/` of
//! this repository.
//!
//! `build` makes a bootable ELF file, `package` a Debian package that can be installed beside Debian's hypervisor. The
//! source files of `xen/` are copied into Xen's source, then the patches for that version of Xen are applied: the
//! hooks in Xen's own files. The result is kept below the cache, beside a digest of what it was made of, and built again
//! when one of these files changes.
//!
//! The source is that of this computer's release, of another one (`--suite`), or an archive (`--source`).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use taskkit::deb::{Control, Deb, epoch, workspace_version};
use taskkit::tools::{self, Tool, Toolbox};

use super::apt::{Apt, Release};
use super::build::{self, Build, BuildTools};
use super::hypervisor;

/// Folders of `xen/` that mirror those of Xen's source.
const SOURCES: [&str; 3] = ["arch", "common", "include"];

/// Build options of `cargo xtask xen`.
#[derive(Args)]
pub struct WindowXenArgs {
    #[command(subcommand)]
    product: Product,
}

#[derive(Subcommand)]
enum Product {
    /// Build the hypervisor and print the path of its ELF file, which `vm xen --hypervisor` boots
    Build(BuildArgs),
    /// Build the hypervisor and put it into a Debian package
    Package(BuildArgs),
}

#[derive(Args)]
struct BuildArgs {
    /// Build with assertions, lock checks, and counters of grant operations
    #[arg(long)]
    debug: bool,
    /// Folder of sources and results; `vm` in the target directory otherwise
    #[arg(long, value_name = "FOLDER", env = "RINGFENCE_VM_CACHE")]
    cache: Option<PathBuf>,
    /// Debian release of Xen's source; by default this computer's
    #[arg(long, value_enum)]
    suite: Option<Release>,
    /// Archive with Xen's source, instead of a Debian package; the version of Xen must be one of xen/patches
    #[arg(long, value_name = "FILE", conflicts_with = "suite")]
    source: Option<PathBuf>,
    /// Install nothing
    #[arg(long)]
    no_install: bool,
}

/// Origin of Xen's source.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// Package of a Debian release; `None` for this computer's.
    Package(Option<Release>),
    /// Archive of this path, with one folder at its top.
    Archive(&'a Path),
}

impl Source<'_> {
    /// Returns the path of the archive, which is downloaded into `folder` if it is a package's.
    fn archive(self, folder: &Path) -> anyhow::Result<String> {
        match self {
            Source::Package(release) => Apt::source_of(release, "xen", folder),
            Source::Archive(file) => Ok(file.display().to_string()),
        }
    }
}

/// Runs `cargo xtask xen`. Prints the path of the product.
pub fn run(args: &WindowXenArgs, root: &Path, target: &Path) -> anyhow::Result<bool> {
    let (Product::Build(args) | Product::Package(args), package) =
        (&args.product, matches!(args.product, Product::Package(_)));
    let cache = args.cache.clone().unwrap_or_else(|| target.join("vm"));
    let cache = std::path::absolute(cache)?;
    std::fs::create_dir_all(&cache)?;
    let toolbox = Toolbox::new(root, target);
    let variant = if args.debug { Variant::Debug } else { Variant::Release };
    let suite = args.suite.map(Release::other).transpose()?.flatten();
    let archive = args.source.as_deref().map(std::path::absolute).transpose()?;
    let (source, cache) = match (&archive, suite) {
        // What an archive makes must not take the place of the hypervisor that scenarios boot.
        (Some(archive), _) => (Source::Archive(archive), cache.join("from-archive")),
        (None, Some(suite)) => (Source::Package(Some(suite)), suite.folder(&cache)),
        (None, None) => (Source::Package(None), cache),
    };
    std::fs::create_dir_all(&cache)?;
    let tools = BuildTools { toolbox: &toolbox, may_install: !args.no_install };
    let built = hypervisor(&root.join("xen"), source, &cache, tools, variant)?;
    let product = if package { deb(&built, root, &cache)? } else { built.elf };
    println!("{}", product.display());
    Ok(true)
}

/// Returns the path of the hypervisor's ELF file for a release; builds it below `cache` unless it is there.
pub(crate) fn elf(
    root: &Path,
    release: Option<Release>,
    cache: &Path,
    tools: BuildTools<'_>,
    variant: Variant,
) -> anyhow::Result<PathBuf> {
    let source = Source::Package(release);
    let built = hypervisor(&root.join("xen"), source, cache, tools, variant)?;
    let build = match variant {
        Variant::Release => "",
        Variant::Debug => ", a debug build",
        Variant::Guards => ", a debug build whose guards can be taken out",
    };
    println!("hypervisor: Xen {} with grant windows{build}", built.version);
    Ok(built.elf)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    Release,
    /// With assertions, lock checks and counters.
    Debug,
    /// The same with `tests/guards.patch`: the command line takes guards out.
    Guards,
}

/// Configuration of debug builds for a security policy, which only `xsm=silo` on Xen's command line selects.
const POLICY: &str = "CONFIG_XSM=y\nCONFIG_XSM_SILO=y\nCONFIG_XSM_DUMMY_DEFAULT=y\n\
                      # CONFIG_XSM_FLASK is not set\n";
/// Patch of the variant [`Variant::Guards`].
const GUARDS: &str = "tests/guards.patch";

/// A hypervisor that was built.
struct Built {
    /// ELF file, as QEMU boots it.
    elf: PathBuf,
    /// Version of Xen, such as 4.17.
    version: String,
}

/// Builds the hypervisor, or finds it in the cache.
fn hypervisor(
    sources: &Path,
    source: Source<'_>,
    cache: &Path,
    tools: BuildTools<'_>,
    variant: Variant,
) -> anyhow::Result<Built> {
    let debug = variant != Variant::Release;
    let guards = (variant == Variant::Guards).then(|| sources.join(GUARDS));
    let name = match variant {
        Variant::Release => "xen-window",
        Variant::Debug => "xen-window-debug",
        Variant::Guards => "xen-window-guards",
    };
    let (elf, stamp) = (cache.join(format!("{name}.elf")), cache.join(format!("{name}.stamp")));
    let _lock = build::lock(cache, name)?;
    let mut recipe = if debug { hypervisor::recipe() + POLICY } else { String::new() };
    if let Some(guards) = &guards {
        recipe += &std::fs::read_to_string(guards)?;
    }
    if let Source::Archive(archive) = source {
        let changed = std::fs::metadata(archive).with_context(|| archive.display().to_string())?;
        recipe += &format!("{} {:?}", archive.display(), changed.modified()?);
    }
    if let Some((known, version)) =
        std::fs::read_to_string(&stamp).unwrap_or_default().split_once(' ')
        && elf.is_file()
        && digest(sources, version, &recipe).is_ok_and(|digest| digest == known)
    {
        return Ok(Built { elf, version: version.to_owned() });
    }
    let needs: Vec<&'static Tool> =
        hypervisor::NEEDS.iter().copied().chain([&tools::PATCH]).collect();
    let folder = cache.join(format!("{name}-source"));
    let build = Build::begin(folder, &needs, tools)?;
    let archive = source.archive(build.folder())?;
    println!("building Xen with grant windows, which takes about a minute");
    build.run(&["tar", "-xf", &archive, "--strip-components=1", "-C", "tree"])?;
    let version = version(&std::fs::read_to_string(build.folder().join("tree/xen/Makefile"))?)
        .context("xen/Makefile has no version")?;
    for folder in SOURCES {
        let from = sources.join(folder).display().to_string();
        build.run(&["cp", "-r", &from, "tree/xen/"])?;
    }
    for patch in patches(&sources.join("patches").join(&version))?.into_iter().chain(guards) {
        let patch = patch.display().to_string();
        build.run(&["patch", "-d", "tree", "-p1", "--no-backup-if-mismatch", "-i", &patch])?;
    }
    let mut options = "CONFIG_GRANT_WINDOW=y\n".to_owned();
    if debug {
        hypervisor::count_operations(&build)?;
        options += hypervisor::DEBUG_OPTIONS;
        options += POLICY;
    }
    hypervisor::make(&build, &options)?;
    build.keep("tree/xen/xen", &elf)?;
    std::fs::write(&stamp, format!("{} {version}", digest(sources, &version, &recipe)?))?;
    Ok(Built { elf, version })
}

/// Patches of a version of Xen, in their order.
fn patches(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let files = std::fs::read_dir(folder).with_context(|| {
        format!("{}: there are no patches for this version of Xen", folder.display())
    })?;
    let mut found: Vec<PathBuf> =
        files.map(|file| Ok(file?.path())).collect::<anyhow::Result<_>>()?;
    found.retain(|file| file.extension().is_some_and(|extension| extension == "patch"));
    found.sort();
    anyhow::ensure!(!found.is_empty(), "{}: no patch", folder.display());
    Ok(found)
}

/// Returns the version in Xen's Makefile, such as 4.17.
fn version(makefile: &str) -> Option<String> {
    let value = |name: &str| {
        makefile.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.split_whitespace().last() == Some(name)).then(|| value.trim().to_owned())
        })
    };
    Some(format!("{}.{}", value("XEN_VERSION")?, value("XEN_SUBVERSION")?))
}

/// Returns the digest of everything that goes into the build for this version of Xen.
fn digest(sources: &Path, version: &str, recipe: &str) -> anyhow::Result<String> {
    let mut hasher = DefaultHasher::new();
    recipe.hash(&mut hasher);
    let mut folders: Vec<PathBuf> = SOURCES.iter().map(|name| sources.join(name)).collect();
    folders.push(sources.join("patches").join(version));
    let mut files = vec![];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() { &mut folders } else { &mut files }.push(path);
        }
    }
    files.sort();
    for file in files {
        // Another checkout with the same sources has the same digest.
        (file.strip_prefix(sources)?, std::fs::read(&file)?).hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// Makes the package with the hypervisor as a boot image, for amd64.
fn deb(built: &Built, root: &Path, cache: &Path) -> anyhow::Result<PathBuf> {
    let xen = &built.version;
    let name = format!("xen-hypervisor-{xen}-ringfence-amd64");
    let mut deb = Deb::new(cache.join("xen-window-package"))?;
    let image = format!("boot/xen-{xen}-ringfence");
    deb.copy(&image, 0o644, &built.elf)?;
    deb.tree().compress(&deb.place(&image)?)?;
    deb.add_copyright(&name, COPYRIGHT)?;
    let script = "#!/bin/sh\nset -e\nif command -v update-grub >/dev/null; then update-grub; fi\n";
    deb.script("postinst", script)?;
    deb.script("postrm", script)?;
    let control = Control {
        name: &name,
        version: &workspace_version(root)?,
        architecture: "amd64",
        section: "kernel",
        fields: &[("Recommends", &format!("xen-utils-{xen}"))],
        synopsis: &format!("Xen hypervisor {xen} with grant windows"),
        description: &[
            "Debian's Xen with grants that the granter issues and revokes without the",
            "grantee's help.",
        ],
    };
    deb.build(&control, cache, epoch(root)?)
}

const COPYRIGHT: &str = "Xen with the grant windows of Ringfence.\n\
     Copyright (c) 2026 The Ringfence developers and the authors of Xen. Licence: GPL-2.0-only.\n\
     The source is Debian's package xen and the folder xen/ of Ringfence.\n\
     /usr/share/common-licenses/GPL-2 has the licence.\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_makefile_is_major_and_minor() {
        let makefile = "export XEN_VERSION       = 4\nexport XEN_SUBVERSION    = 17\nall:\n";
        assert_eq!(version(makefile).as_deref(), Some("4.17"));
        assert_eq!(version("all:\n"), None);
    }

    #[test]
    fn digest_changes_with_content_of_a_source() {
        let folder = std::env::temp_dir().join(format!("window-xen-{}", std::process::id()));
        for name in SOURCES.iter().copied().chain(["patches/4.17", "patches/4.20"]) {
            std::fs::create_dir_all(folder.join(name)).unwrap();
        }
        let file = folder.join("common/a.c");
        std::fs::write(&file, "1").unwrap();
        let before = digest(&folder, "4.17", "").unwrap();
        assert_eq!(digest(&folder, "4.17", "").unwrap(), before);
        assert_ne!(digest(&folder, "4.17", "debug").unwrap(), before);
        std::fs::write(folder.join("patches/4.20/a.patch"), "1").unwrap();
        assert_eq!(digest(&folder, "4.17", "").unwrap(), before, "patches of another version");
        std::fs::write(folder.join("patches/4.17/a.patch"), "1").unwrap();
        assert_ne!(digest(&folder, "4.17", "").unwrap(), before);
        std::fs::write(&file, "2").unwrap();
        assert_ne!(digest(&folder, "4.17", "").unwrap(), before);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn version_without_patches_is_refused() {
        assert!(patches(Path::new("/nonexistent/4.99")).is_err());
    }
}

//! Newest kernel of Debian's backports, for guests of scenarios with `# kernel: newest`: a part of dom0's root file
//! system with the kernel, and a part for guests with its modules and the module of `linux/netfront`.
//!
//! Both are kept until the package or a source changes. They are made when a scenario wants them.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::apt::Apt;
use super::build::{self, Build, BuildTools};
use super::cpio::Archive;
use super::images::GUEST_MODULES;
use super::kernel::{self, Modules, in_root};
use super::module::{self, NEEDS, NETFRONT};

/// Metapackage that names the newest kernel.
const NEWEST: &str = "linux-image-amd64";
/// File name of the part.
const ARCHIVE: &str = "newest-kernel.cpio";

/// Makes the part below `cache`, or finds it there; returns its path.
pub(crate) fn archive(root: &Path, cache: &Path, tools: BuildTools<'_>) -> anyhow::Result<PathBuf> {
    let _lock = build::lock(cache, "newest-kernel")?;
    let apt = Apt::backports(cache)?;
    let found = apt.depends(NEWEST, "linux-image-")?.into_iter().next();
    let image = found.with_context(|| format!("{NEWEST} names no kernel"))?;
    let release = image.trim_start_matches("linux-image-").to_owned();
    let sources = NETFRONT.sources(root)?;
    let (built, stamp) = (cache.join(ARCHIVE), cache.join("newest-kernel.stamp"));
    let state = release.clone() + include_str!("newest_kernel.rs");
    let state = sources.iter().fold(state, |state, (name, text)| state + name + text);
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(built);
    }
    println!("building {} for Linux {release}, which guests boot", NETFRONT.file);
    let build = Build::begin(cache.join("newest-kernel"), NEEDS, tools)?;
    let tree = build.folder().join("tree");
    let headers = module::unpack_headers(
        &apt,
        &format!("linux-headers-{release}"),
        &[image.as_str()],
        &tree,
    )?;
    NETFRONT.compile(&build, &headers, &sources)?;
    let modules = in_root(&tree, "lib/modules").join(&release);
    build.run(&kernel::unpack_modules(&modules).each_ref().map(String::as_str))?;

    let mut guest = Archive::new(Vec::new());
    Modules::find(&tree, &release)?.add(GUEST_MODULES, &mut guest)?;
    guest.copy(&format!("lib/{}", NETFRONT.file), &build.folder().join(NETFRONT.file))?;
    let mut dom0 = Archive::new(Vec::new());
    // Packed by zstd; the toolstack unpacks it.
    dom0.copy("boot/vmlinuz-newest", &tree.join("boot").join(format!("vmlinuz-{release}")))?;
    dom0.file("boot/newest.cpio", false, &guest.finish()?)?;
    std::fs::write(build.folder().join(ARCHIVE), dom0.finish()?)?;
    build.keep(ARCHIVE, &built)?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}

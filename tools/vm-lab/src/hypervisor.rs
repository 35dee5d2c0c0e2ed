//! Debug build of the hypervisor from Debian's source package. It names every bad grant, and counts grant
//! operations (debug key `p`); Debian's own build does neither. The build takes about a minute and is kept.
//!
//! Xen's performance counters count hypercalls, each of which has a batch of operations. So a counter for each
//! kind of operation is added to the loop over the batch.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::tools::{self, Tool};

use super::apt::{Apt, Release};
use super::build::{Build, BuildTools};

/// Tools that the build needs.
pub(crate) static NEEDS: &[&Tool] =
    &[&tools::GCC, &tools::MAKE, &tools::BISON, &tools::FLEX, &tools::PYTHON3];

/// Additions to the source: file, line, and the text before that line.
static COUNTERS: [(&str, &str, &str); 6] = [
    (
        "tree/xen/include/xen/perfc_defn.h",
        "PERFCOUNTER(need_flush_tlb_flush,   \"PG_need_flush tlb flushes\")",
        "PERFCOUNTER(grant_maps, \"grant maps\")\nPERFCOUNTER(grant_unmaps, \"grant unmaps\")\n\
         PERFCOUNTER(grant_copies, \"grant copies\")\nPERFCOUNTER(grant_calls, \"grant calls\")\n\
         PERFCOUNTER(tlb_flushes, \"TLB flushes\")",
    ),
    ("tree/xen/common/grant_table.c", "switch ( cmd )", "perfc_incr(grant_calls);"),
    // Those that a change of a mapping asks for, not those of a change of domains.
    (
        "tree/xen/arch/x86/smp.c",
        "if ( (flags & ~(FLUSH_VCPU_STATE | FLUSH_ORDER_MASK)) &&",
        "perfc_incr(tlb_flushes);",
    ),
    ("tree/xen/common/grant_table.c", "map_grant_ref(&op);", "perfc_incr(grant_maps);"),
    (
        "tree/xen/common/grant_table.c",
        "unmap_grant_ref(&op, &common[i]);",
        "perfc_incr(grant_unmaps);",
    ),
    (
        "tree/xen/common/grant_table.c",
        "rc = gnttab_copy_one(&op, &dest, &src);",
        "perfc_incr(grant_copies);",
    ),
];

/// Returns the settings on which a debug build depends besides its sources.
pub(crate) fn recipe() -> String {
    format!("{DEBUG_OPTIONS}{COUNTERS:?}")
}

/// Inserts a line before the only line of `text` that equals `line` without indentation. Returns `None` if there
/// are none or several.
fn insert(text: &str, line: &str, new: &str) -> Option<String> {
    let places: Vec<usize> =
        text.lines().enumerate().filter(|(_, l)| l.trim() == line).map(|(n, _)| n).collect();
    let [place] = places[..] else { return None };
    let mut lines: Vec<&str> = text.lines().collect();
    lines.insert(place, new);
    Some(lines.join("\n") + "\n")
}

/// Builds the hypervisor below `cache` unless it is there, and returns the path of its ELF file.
pub(crate) fn debug(
    suite: Option<Release>,
    cache: &Path,
    tools: BuildTools<'_>,
) -> anyhow::Result<PathBuf> {
    let built = cache.join("xen-debug-counters.elf");
    let stamp = cache.join("xen-debug-counters.stamp");
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|known| known == recipe()) {
        return Ok(built);
    }
    let build = Build::begin(cache.join("xen-source"), NEEDS, tools)?;
    let archive = Apt::source_of(suite, "xen", build.folder())?;
    println!("building Xen for debugging, which takes about a minute");
    build.run(&["tar", "-xf", &archive, "--strip-components=1", "-C", "tree"])?;
    count_operations(&build)?;
    make(&build, DEBUG_OPTIONS)?;
    build.keep("tree/xen/xen", &built)?;
    std::fs::write(&stamp, recipe())?;
    Ok(built)
}

/// Configuration of a hypervisor for debugging: assertions and lock checks, reports of undefined behaviour, counters; and shadow
/// paging, without which PV guests do not migrate and which Xen 4.20 leaves out by default.
pub(crate) const DEBUG_OPTIONS: &str = "CONFIG_DEBUG=y\nCONFIG_UBSAN=y\n\
    CONFIG_PERF_COUNTERS=y\nCONFIG_SHADOW_PAGING=y\n";

/// Inserts the counters of grant operations into the source.
pub(crate) fn count_operations(build: &Build<'_>) -> anyhow::Result<()> {
    for (file, line, new) in COUNTERS {
        let file = build.folder().join(file);
        let changed = insert(&std::fs::read_to_string(&file)?, line, new);
        let changed =
            changed.with_context(|| format!("{}: not one line `{line}`", file.display()))?;
        std::fs::write(&file, changed)?;
    }
    Ok(())
}

/// Configures the hypervisor with these options and builds it.
pub(crate) fn make(build: &Build<'_>, options: &str) -> anyhow::Result<()> {
    std::fs::write(build.folder().join("tree/xen/.config"), options)?;
    build.make(&["-C", "xen", "olddefconfig"])?;
    build.is_configured("tree/xen/.config", options)?;
    build.make(&["-C", "xen"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_inserted_before_the_named_one() {
        let text = "f()\n{\n    map(&op);\n}\nunmap(&op);\n";
        let changed = "f()\n{\ncount();\n    map(&op);\n}\nunmap(&op);\n";
        assert_eq!(insert(text, "map(&op);", "count();").as_deref(), Some(changed));
        assert_eq!(insert(text, "copy(&op);", "count();"), None);
        assert_eq!(insert("a\na\n", "a", "b"), None, "which one?");
    }
}

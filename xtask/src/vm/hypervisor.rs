//! A hypervisor built for debugging, out of Debian's source package: it names every bad grant, and
//! counts grant operations (`xenperf`). Debian's own does neither. The build takes about a minute, and
//! is kept.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::apt::Apt;
use crate::exec::Cmd;
use crate::tools::{self, Tool, Toolbox};

/// What the build needs installed.
static NEEDS: &[&Tool] = &[&tools::GCC, &tools::MAKE, &tools::BISON, &tools::FLEX, &tools::PYTHON3];

/// Builds it below `cache`, or finds that it is there already: the path of its ELF file.
pub(super) fn debug(cache: &Path, toolbox: &Toolbox, may_install: bool) -> anyhow::Result<PathBuf> {
    let built = cache.join("xen-debug.elf");
    if built.is_file() {
        return Ok(built);
    }
    let mut missing = toolbox.missing(NEEDS);
    if !missing.is_empty() && may_install {
        toolbox.install(&missing)?;
        missing = toolbox.missing(NEEDS);
    }
    anyhow::ensure!(missing.is_empty(), "{}", tools::how_to_get(&missing));
    let folder = cache.join("xen-source");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(folder.join("tree"))?;
    let archive = Apt::new(cache).source("xen", &folder)?;
    let run = |words: &[&str]| -> anyhow::Result<()> {
        let (program, args) = words.split_first().context("a command has a first word")?;
        let command = Cmd::new(*program).args(args.iter().copied()).env("PATH", toolbox.path());
        let done = command.output(&folder)?;
        done.map(|_| ()).map_err(|message| {
            let tail: Vec<&str> = message.lines().rev().take(10).collect();
            anyhow::anyhow!(
                "{}: {}",
                words.join(" "),
                tail.into_iter().rev().collect::<Vec<_>>().join("\n")
            )
        })
    };
    println!("building Xen for debugging, which takes about a minute");
    run(&["tar", "-xf", &archive, "--strip-components=1", "-C", "tree"])?;
    let options = "CONFIG_DEBUG=y\nCONFIG_PERF_COUNTERS=y\n";
    std::fs::write(folder.join("tree/xen/.config"), options)?;
    run(&["make", "-C", "tree/xen", "olddefconfig"])?;
    let config = std::fs::read_to_string(folder.join("tree/xen/.config"))?;
    for option in options.lines() {
        anyhow::ensure!(config.lines().any(|line| line == option), "Xen has no option {option}");
    }
    let jobs = std::thread::available_parallelism()?;
    run(&["make", "-C", "tree/xen", &format!("-j{jobs}")])?;
    // Copied under another name first: what is there is whole.
    let new = cache.join("xen-debug.new");
    std::fs::copy(folder.join("tree/xen/xen"), &new)?;
    std::fs::rename(&new, &built)?;
    std::fs::remove_dir_all(&folder)?;
    Ok(built)
}

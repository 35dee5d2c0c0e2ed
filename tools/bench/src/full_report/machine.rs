//! Facts about the machine and the programs of a run.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;

/// Time in which the use of the processors is read.
const WATCHED: Duration = Duration::from_millis(500);

/// Returns names and values of the facts that figures depend on.
pub(super) fn facts() -> anyhow::Result<Vec<(String, String)>> {
    let cpu = fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    let memory = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let kernel = rustix::system::uname();
    let release = kernel.release().to_string_lossy().into_owned();
    let cores = crate::affinity::allowed()?.len();
    let place = if is_virtual(&cpu) { "virtual machine" } else { "no hypervisor" };
    let facts = [
        ("processor", field(&cpu, "model name").unwrap_or("unknown").to_owned()),
        ("cores", cores.to_string()),
        ("place", place.to_owned()),
        (
            "memory",
            memory_gib(&memory).map_or_else(|| "unknown".to_owned(), |gib| format!("{gib:.1} GiB")),
        ),
        ("kernel", format!("{} {release}", kernel.sysname().to_string_lossy())),
        ("architecture", kernel.machine().to_string_lossy().into_owned()),
    ];
    Ok(facts.map(|(name, value)| (name.to_owned(), value)).to_vec())
}

/// Returns the first value of a name in `/proc/cpuinfo` or `/proc/meminfo`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(known, _)| known.trim() == name).map(|(_, value)| value.trim())
}

fn is_virtual(cpu: &str) -> bool {
    field(cpu, "flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"))
}

fn memory_gib(memory: &str) -> Option<f64> {
    let kib = field(memory, "MemTotal")?.split(' ').next()?.parse::<f64>().ok()?;
    Some(kib / f64::from(1 << 20))
}

/// Measures the share of the machine's processor time that is in use, by this program, others and the hypervisor.
pub(super) fn busy() -> anyhow::Result<f64> {
    let read = || fs::read_to_string("/proc/stat").context("/proc/stat");
    let before = read()?;
    std::thread::sleep(WATCHED);
    busy_between(&before, &read()?).context("the first line of /proc/stat has another form")
}

/// Returns the share in use between two readings of `/proc/stat`.
fn busy_between(before: &str, after: &str) -> Option<f64> {
    // user, nice, system, idle, iowait, irq, softirq, steal; the time of guests is part of the user's.
    let ticks = |text: &str| -> Option<[f64; 2]> {
        let line = text.lines().next()?.strip_prefix("cpu ")?;
        let fields = line.split_whitespace().take(8).map(|field| field.parse::<f64>().ok());
        let fields: Vec<f64> = fields.collect::<Option<_>>()?;
        let idle = fields.get(3)? + fields.get(4)?;
        Some([fields.iter().sum::<f64>(), idle])
    };
    let ([all, idle], [all_before, idle_before]) = (ticks(after)?, ticks(before)?);
    let all = all - all_before;
    Some(if all > 0.0 { (1.0 - (idle - idle_before) / all).clamp(0.0, 1.0) } else { 0.0 })
}

/// Returns `true` if a program is in the PATH.
pub(super) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Returns the line in which a program prints its version. Some programs know another option.
pub(super) fn version(program: &str) -> String {
    let line = ["--version", "-V"].into_iter().find_map(|option| {
        let output = Command::new(program).arg(option).stdin(Stdio::null()).output().ok()?;
        // Without -V, a program prints its usage.
        if option == "-V" && !output.status.success() {
            return None;
        }
        let both = [output.stdout, output.stderr];
        let mut texts = both.iter().map(|bytes| String::from_utf8_lossy(bytes));
        texts.find_map(|text| version_line(&text).map(str::to_owned))
    });
    line.unwrap_or_else(|| "unknown".to_owned())
}

/// Returns the first line that has a number with a dot or a line in it, such as `1.2` or `2026_07`, and no address of a page.
fn version_line(text: &str) -> Option<&str> {
    let has_number = |line: &str| {
        let bytes = line.as_bytes();
        bytes.windows(3).any(|three| {
            b"._".contains(&three[1]) && three[0].is_ascii_digit() && three[2].is_ascii_digit()
        })
    };
    let is_version = |line: &&str| has_number(line) && !line.contains("://");
    text.lines().map(str::trim).find(is_version)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: &str =
        "processor\t: 0\nmodel name\t: A B 9\nflags\t\t: fpu hypervisor\n\nmodel name\t: C\n";

    #[test]
    fn facts_are_read_by_name() {
        assert_eq!((field(CPU, "model name"), field(CPU, "model")), (Some("A B 9"), None));
        assert!(is_virtual(CPU) && !is_virtual(&CPU.replace(" hypervisor", " hyper")));
        assert_eq!(memory_gib("MemTotal:    2097152 kB\n"), Some(2.0));
        assert_eq!(memory_gib("MemFree: 1 kB\n"), None);
        let names: Vec<String> = facts().unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names[..2], ["processor", "cores"]);
    }

    #[test]
    fn use_of_the_processors_counts_all_but_idle_time() {
        let before = "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1\n";
        let after = "cpu  130 0 110 850 0 0 0 10 5 0\ncpu0 1\n";
        assert_eq!(busy_between(before, after), Some(0.5));
        assert_eq!(busy_between(before, before), Some(0.0));
        assert_eq!(busy_between(before, "intr 1"), None);
        assert!((0.0..=1.0).contains(&busy().unwrap()));
    }

    #[test]
    fn line_of_the_version_is_found_among_others() {
        let usage = "Option \"-version\" is unknown, try \"ip -help\".";
        let format =
            "  The argument format is <c1>[-c2][,c3[-c4],...]\n EAL: RTE Version: 'DPDK 22.11.8'";
        assert_eq!(
            version_line("ip utility, iproute2-6.1.0\n"),
            Some("ip utility, iproute2-6.1.0")
        );
        assert_eq!(version_line(format), Some("EAL: RTE Version: 'DPDK 22.11.8'"));
        assert_eq!(
            version_line("pasta unknown version\nGPL 3 <https://x.example/gpl-3.0.html>"),
            None
        );
        assert_eq!(version_line(usage), None);
    }

    #[test]
    fn program_that_does_not_exist_has_no_version() {
        assert!(!is_installed("ringfence-no-such-program"));
        assert_eq!(version("ringfence-no-such-program"), "unknown");
    }
}

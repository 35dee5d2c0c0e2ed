//! The fixed set: each section's command, its prerequisites, and the charts of its rows.

mod neighbour;

use std::path::Path;

use super::args::SectionName;
use super::machine;
use super::rows::{Rounds, chart, other, ours};
use crate::block::seeds::PUBLISHED;
use crate::harness::{Bar, BarChart};

/// Prerequisite of a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Need {
    Root,
    /// Device of the kernel.
    Device(&'static str),
    /// Program in the PATH.
    Program(&'static str),
}

/// Program to compare with: its name in `--vs`, and its file.
pub(super) type Peer = (&'static str, &'static str);

/// Section of the set.
pub(super) struct Spec {
    pub(super) name: SectionName,
    pub(super) title: &'static str,
    pub(super) about: &'static str,
    pub(super) needs: &'static [Need],
    /// Programs to compare with. Without any of them, there is no section.
    pub(super) peers: &'static [Peer],
    /// Size in MiB of the file `disk.img` that the command reads.
    pub(super) disk_mib: Option<u32>,
    /// Words of the command, without `--vs`.
    pub(super) words: fn(&Plan) -> String,
    pub(super) charts: fn(&Rounds) -> Vec<Option<BarChart>>,
}

/// Extent of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) quick: bool,
    pub(super) root: bool,
}

impl Need {
    /// Returns a description of what is missing, or `None`.
    fn missing(self) -> Option<String> {
        match self {
            Need::Root => {
                (!rustix::process::geteuid().is_root()).then(|| "it needs root".to_owned())
            }
            Need::Device(path) => {
                (!Path::new(path).exists()).then(|| format!("there is no {path}"))
            }
            Need::Program(name) => {
                (!machine::is_installed(name)).then(|| format!("{name} is not installed"))
            }
        }
    }
}

impl Spec {
    /// Returns the reason for which this machine cannot run the section; `None` if it can.
    pub(super) fn missing(&self) -> Option<String> {
        let missing = self.needs.iter().find_map(|need| need.missing());
        let has_peer = self.peers.is_empty() || self.installed().next().is_some();
        missing.or_else(|| (!has_peer).then(|| self.absent().join("; ")))
    }

    /// Returns the peers that are installed.
    pub(super) fn installed(&self) -> impl Iterator<Item = Peer> {
        self.peers.iter().copied().filter(|(_, program)| machine::is_installed(program))
    }

    /// Returns a sentence for each program that is missing.
    pub(super) fn absent(&self) -> Vec<String> {
        let absent = self.peers.iter().filter(|(_, program)| !machine::is_installed(program));
        let mut absent: Vec<String> =
            absent.map(|(_, program)| format!("{program} is not installed")).collect();
        absent.dedup();
        absent
    }

    /// Returns the words of the command.
    pub(super) fn words(&self, plan: &Plan) -> Vec<String> {
        let mut words: Vec<String> =
            (self.words)(plan).split_whitespace().map(str::to_owned).collect();
        let peers: Vec<&str> = self.installed().map(|(name, _)| name).collect();
        if !peers.is_empty() {
            words.extend(["--vs".to_owned(), peers.join(",")]);
        }
        words
    }
}

/// All sections, in the order of the page.
pub(super) static SECTIONS: [Spec; 10] = [
    Spec {
        name: SectionName::Persistent,
        title: "Persistent grants: requests against the number of guests",
        about: "Random reads of 4 KiB from disks in memory, by 5 and by 10 guests. With each page mapped for its \
                request (map), a driver domain with 24 processors did 650,000 requests a second for 5 guests and \
                400,000 for 10, because each unmapping interrupts every processor. Persistent grants keep the pages.",
        needs: &[],
        peers: &[],
        disk_mib: None,
        words: |plan| {
            let seconds = if plan.quick { "0.1" } else { "2" };
            format!("seeds persistent --json --guests 5,10 --repeat 1 --seconds {seconds}")
        },
        charts: persistent,
    },
    Spec {
        name: SectionName::Staging,
        title: "Staging grants: packets by size",
        about: "Packets from domain to domain over one queue. The bars are rates with staging grants as multiples of \
                the rate with copies. Published: a guest of Linux 4.11 on Xen, an E5-2630 v4, a network of 100 Gbit/s.",
        needs: &[],
        peers: &[],
        disk_mib: None,
        words: |plan| {
            let extent =
                if plan.quick { "--size 64 --seconds 0.1" } else { "--size 64,65000 --seconds 2" };
            format!("seeds staging --json --rounds 1 --queues 1 {extent}")
        },
        charts: staging,
    },
    Spec {
        name: SectionName::Gso,
        title: "Super-packets: TCP with segmentation offload",
        about: "One TCP stream, as a multiple of the rate with packets of 1500 bytes in one slot each. Published: \
                Xen with the first version of TCP segmentation offload in netif.",
        needs: &[],
        peers: &[],
        disk_mib: None,
        words: |plan| match (plan.quick, plan.root) {
            (true, _) => {
                "seeds gso --json --rounds 1 --paths guest-guest --setups tso --seconds 0.3"
                    .to_owned()
            }
            (false, true) => {
                "seeds gso --json --rounds 1 --paths guest-guest,guest-driver --seconds 2"
                    .to_owned()
            }
            (false, false) => {
                "seeds gso --json --rounds 1 --paths guest-guest --seconds 2".to_owned()
            }
        },
        charts: gso,
    },
    Spec {
        name: SectionName::Redesigned,
        title: "Redesigned grants: issued and revoked by the guest alone",
        about: "One TCP stream with grant windows, as a multiple of the original mechanism (pages mapped to transmit, \
                copied by the system to receive). Cost is processor time for each byte. Published: Xen with two links \
                of 10 Gbit/s.",
        needs: &[],
        peers: &[],
        disk_mib: None,
        words: |plan| {
            let extent =
                if plan.quick { "--experiments guest-guest --seconds 0.3" } else { "--seconds 2" };
            format!("seeds redesigned --json --rounds 1 --modes window {extent}")
        },
        charts: redesigned,
    },
    Spec {
        name: SectionName::Vhost,
        title: "vhost-net beside a TAP",
        about: "One TCP stream between a namespace and an uplink, over kernel vhost-net, as a multiple of the rate \
                by reads and writes of a TAP. Published: a proposal for pasta; the machine is not named.",
        needs: &[Need::Root, Need::Device("/dev/vhost-net")],
        peers: &[],
        disk_mib: None,
        words: |plan| {
            let seconds = if plan.quick { "0.3" } else { "2" };
            format!("seeds vhost --json --rounds 1 --mtu 65520 --seconds {seconds}")
        },
        charts: vhost,
    },
    Spec {
        name: SectionName::Dpdk,
        title: "Packets beside DPDK",
        about: "Packets between two processes that poll, on the same two cores. Ringfence verifies length and \
                sequence number of each packet; testpmd verifies nothing.",
        needs: &[],
        peers: &[("memif", "dpdk-testpmd"), ("vhost-user", "dpdk-testpmd")],
        disk_mib: None,
        words: |plan| {
            let extent =
                if plan.quick { "--size 64 --seconds 0.2" } else { "--size 64,1500 --seconds 2" };
            format!("net --json --modes staging --verify sequence --poll {extent}")
        },
        charts: dpdk,
    },
    Spec {
        name: SectionName::Disks,
        title: "A file as a disk, beside other NBD servers",
        about: "Random reads of 4 KiB from a file, 32 in flight, by the same job of fio over NBD. nbdkit reads \
                through the page cache; the others do not.",
        needs: &[Need::Program("fio")],
        peers: &[
            ("qemu-nbd", "qemu-nbd"),
            ("qemu-storage-daemon", "qemu-storage-daemon"),
            ("nbdkit", "nbdkit"),
        ],
        disk_mib: Some(256),
        words: |plan| {
            let seconds = if plan.quick { "0.3" } else { "2" };
            format!(
                "block --json --guests 1 --modes persistent --storage disk.img --cache none --seconds {seconds}"
            )
        },
        charts: disks,
    },
    Spec {
        name: SectionName::Uplink,
        title: "A namespace's network, beside other programs",
        about: "TCP between a network namespace and the host, through each program. veth is a pair of interfaces of \
                the kernel, which needs root.",
        needs: &[Need::Root, Need::Program("ip")],
        peers: &[("pasta", "pasta"), ("slirp4netns", "slirp4netns"), ("veth", "ip")],
        disk_mib: None,
        words: |plan| {
            let extent = if plan.quick {
                "--case tcp-rr --seconds 0.2"
            } else {
                "--case tcp-stream,tcp-rr,tcp-crr --seconds 1"
            };
            format!("uplink --json --rounds 1 --congestion cubic {extent}")
        },
        charts: uplink,
    },
    Spec {
        name: SectionName::Cost,
        title: "Cost of each component",
        about: "Cycles of the time-stamp counter for each packet that one more component costs, at a fixed load of 100,000 \
                packets a second in bursts of 32, on one core: the difference of two paths that differ by it alone. \
                Operations that no pair of paths separates are timed alone. A difference below 0 is noise and drawn as 0. \
                Published: the greatest figures of seL4's device driver framework, 350 to 1,500 cycles for one more \
                domain and 700 to 1,000 for a copy of 1.5 KiB.",
        needs: &[],
        peers: &[],
        disk_mib: None,
        words: |plan| {
            let extent = if plan.quick { "--size 64 --seconds 0.1" } else { "--size 64,1500" };
            format!("cost --json --rounds 1 {extent}")
        },
        charts: neighbour::cost,
    },
    Spec {
        name: SectionName::Neighbour,
        title: "Latency beside a hostile neighbour",
        about: "Time from one packet of an honest guest to its answer by the driver domain: alone, beside an honest \
                neighbour that sends as much as it can, and beside neighbours that break rules as fast as they can. \
                The aim is a p99.9 of at most 1.5 times that alone. For comparison, Chamelio (arXiv 2604.22603) \
                reports 46 µs under an adversary where others have 154 µs.",
        needs: &[],
        peers: &[],
        disk_mib: None,
        words: |plan| {
            let extent =
                if plan.quick { "--behaviours event-storm --seconds 0.1" } else { "--seconds 1" };
            format!("tail --json --rounds 1 {extent}")
        },
        charts: neighbour::neighbour,
    },
];

/// Directions of packets, with their names for a reader.
const DIRECTIONS: [(&str, &str); 2] = [("tx", "to the backend"), ("rx", "from the backend")];

fn persistent(rounds: &Rounds) -> Vec<Option<BarChart>> {
    fn row<'a>(mode: &'a str, guests: &'a str) -> [(&'a str, &'a str); 2] {
        [("mode", mode), ("guests", guests)]
    }
    let [(fewer, before), (more, after)] = PUBLISHED;
    let (fewer, more) = (fewer.to_string(), more.to_string());
    let scaled = |mode: &str| rounds.ratios(&row(mode, &more), &row(mode, &fewer), "iops");
    let map = Bar { ours: false, ..ours("map", scaled("map"), Some(after / before)) };
    let scaling = vec![(String::new(), vec![map, ours("persistent", scaled("persistent"), None)])];
    let by_map = |guests: &String| {
        let values = rounds.ratios(&row("persistent", guests), &row("map", guests), "iops");
        ours(&format!("{guests} guests"), values, None)
    };
    let modes = vec![(String::new(), vec![by_map(&fewer), by_map(&more)])];
    let title = format!("Requests a second, {more} guests by {fewer} guests");
    vec![
        chart(["scaling", &title, "ratio"], false, scaling),
        chart(["modes", "Requests a second, persistent by map", "ratio"], false, modes),
    ]
}

fn staging(rounds: &Rounds) -> Vec<Option<BarChart>> {
    let mut groups = Vec::new();
    for size in ["64", "65000"] {
        for (direction, name) in DIRECTIONS {
            let row = [
                ("mode", "staging"),
                ("verify", "sequence"),
                ("size", size),
                ("direction", direction),
            ];
            let published = rounds.values(&row, "wanted_ratio").first().copied();
            let bar = ours("staging by copy", rounds.values(&row, "staging_ratio"), published);
            groups.push((format!("{size} bytes, {name}"), vec![bar]));
        }
    }
    vec![chart(["packets", "Packets a second", "ratio"], false, groups)]
}

fn gso(rounds: &Rounds) -> Vec<Option<BarChart>> {
    let paths = [("guest-guest", "guest to guest"), ("guest-driver", "guest to driver domain")];
    let setups = [("mtu16436-sg", "MTU of 16,436 bytes"), ("tso", "super-packets")];
    let group = |(path, name): (&str, &str)| {
        let bar = |(setup, name)| {
            let row = [("path", path), ("setup", setup)];
            let published = rounds.values(&row, "published_ratio").first().copied();
            ours(name, rounds.values(&row, "ratio"), published)
        };
        (name.to_owned(), setups.map(bar).to_vec())
    };
    vec![chart(["stream", "TCP by MTU of 1500 bytes", "ratio"], false, paths.map(group).to_vec())]
}

fn redesigned(rounds: &Rounds) -> Vec<Option<BarChart>> {
    let groups = |figure: &str| {
        let published = format!("published_{figure}");
        let group = |(experiment, name): (&str, &str)| {
            let row = [("experiment", experiment), ("mode", "window")];
            let published = rounds.values(&row, &published).first().copied();
            (
                name.to_owned(),
                vec![ours("window by original", rounds.values(&row, figure), published)],
            )
        };
        [("receive", "to a guest"), ("transmit", "from a guest"), ("guest-guest", "guest to guest")]
            .map(group)
            .to_vec()
    };
    vec![
        chart(["throughput", "Throughput", "ratio"], false, groups("gbps_ratio")),
        chart(["cost", "Processor time for each byte", "ratio"], true, groups("cost_ratio")),
    ]
}

/// Directions of a namespace's packets, with their names for a reader.
const WAYS: [(&str, &str); 2] =
    [("ns-host", "namespace to host"), ("host-ns", "host to namespace")];

fn vhost(rounds: &Rounds) -> Vec<Option<BarChart>> {
    let group = |(direction, name): (&str, &str)| {
        let bar = |(offload, name)| {
            let row = [("link", "vhost"), ("direction", direction), ("offload", offload)];
            let published = rounds.values(&row, "seed_to_tap").first().copied();
            ours(name, rounds.values(&row, "to_tap"), published)
        };
        let bars = [("none", "without offloads"), ("whole", "super-packets")].map(bar);
        (name.to_owned(), bars.to_vec())
    };
    vec![chart(["stream", "vhost-net by TAP", "ratio"], false, WAYS.map(group).to_vec())]
}

fn dpdk(rounds: &Rounds) -> Vec<Option<BarChart>> {
    let mut groups = Vec::new();
    for size in ["64", "1500"] {
        for (direction, name) in DIRECTIONS {
            let row = |who, program| [(who, program), ("size", size), ("direction", direction)];
            let mega = |row: [(&str, &str); 3]| -> Vec<f64> {
                rounds.values(&row, "pps").into_iter().map(|pps| pps / 1e6).collect()
            };
            let peer = |name| other(name, mega(row("peer", name)));
            let own = ours("ringfence, staging", mega(row("mode", "staging")), None);
            groups.push((
                format!("{size} bytes, {name}"),
                vec![own, peer("memif"), peer("vhost-user")],
            ));
        }
    }
    vec![chart(["packets", "Packets", "millions a second"], false, groups)]
}

fn disks(rounds: &Rounds) -> Vec<Option<BarChart>> {
    let peers = ["qemu-nbd", "qemu-storage-daemon", "nbdkit"];
    let values = |peer: &str, figure: &str| rounds.values(&[("peer", peer)], figure);
    let bars = |figure: &str| -> Vec<Bar> {
        let own = ours("ringfence run --disk", values("ringfence-nbd", figure), None);
        [own].into_iter().chain(peers.map(|peer| other(peer, values(peer, figure)))).collect()
    };
    let groups = |figure: &str| vec![(String::new(), bars(figure))];
    vec![
        chart(["requests", "Random reads of 4 KiB", "requests a second"], false, groups("iops")),
        chart(["p99", "Slowest hundredth of the reads (p99)", "µs"], true, groups("p99_us")),
    ]
}

fn uplink(rounds: &Rounds) -> Vec<Option<BarChart>> {
    const PEERS: [&str; 3] = ["pasta", "slirp4netns", "veth"];
    let bars = |case: &[(&str, &str)], figure: &str| -> Vec<Bar> {
        let values = |peer: &str| rounds.values(&[case, &[("peer", peer)]].concat(), figure);
        let own = ours("ringfence", values("ringfence"), None);
        [own].into_iter().chain(PEERS.map(|peer| other(peer, values(peer)))).collect()
    };
    let stream = |(direction, name): (&str, &str)| {
        let case =
            [("case", "tcp-stream"), ("mtu", "65520"), ("streams", "1"), ("direction", direction)];
        (name.to_owned(), bars(&case, "gbps"))
    };
    let one = |case: &str, figure: &str| vec![(String::new(), bars(&[("case", case)], figure))];
    vec![
        chart(["stream", "One TCP stream", "Gbit/s"], false, WAYS.map(stream).to_vec()),
        chart(["connections", "New connections", "a second"], false, one("tcp-crr", "per_second")),
        chart(["request", "Request and answer, median", "µs"], true, one("tcp-rr", "p50_us")),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::{Parser, ValueEnum};

    use super::super::rows::parse;
    use super::*;

    #[test]
    fn every_section_is_there_once_and_its_commands_parse() {
        let names: Vec<SectionName> = SECTIONS.iter().map(|section| section.name).collect();
        assert_eq!(names, SectionName::value_variants());
        for section in &SECTIONS {
            for (quick, root) in [(false, false), (false, true), (true, false)] {
                let words = section.words(&Plan { quick, root });
                let line = ["ringfence-bench".to_owned()].into_iter().chain(words);
                let line: Vec<String> = line.collect();
                let parsed = crate::cli::Cli::try_parse_from(&line);
                assert!(parsed.is_ok(), "{line:?}: {}", parsed.unwrap_err());
                assert!(line.contains(&"--json".to_owned()), "{line:?}");
            }
            // The names of programs to compare with are those of the command.
            let peers: Vec<&str> = section.peers.iter().map(|(name, _)| *name).collect();
            if !peers.is_empty() {
                let words = (section.words)(&Plan { quick: true, root: true });
                let line = format!("ringfence-bench {words} --vs {}", peers.join(","));
                let parsed = crate::cli::Cli::try_parse_from(line.split_whitespace());
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
            }
        }
    }

    /// Rows as the commands print them, shortened to the fields that charts read.
    const ROWS: &str = r#"{"mode":"map","guests":5,"iops":100.0,"peer":"ringfence"}
{"mode":"map","guests":10,"iops":80.0,"peer":"ringfence"}
{"mode":"persistent","guests":5,"iops":200.0,"peer":"ringfence"}
{"mode":"persistent","guests":10,"iops":400.0,"peer":"ringfence"}
{"experiment":"staging-grants","direction":"tx","queues":1,"size":64,"mode":"staging","verify":"sequence","staging_ratio":5.0,"wanted_ratio":3.64}
{"path":"guest-guest","setup":"tso","ratio":8.0,"published_ratio":5.18}
{"experiment":"receive","mode":"window","gbps_ratio":1.5,"cost_ratio":0.6,"published_gbps_ratio":1.18,"published_cost_ratio":0.69}
{"link":"vhost","direction":"ns-host","offload":"none","to_tap":0.9,"seed_to_tap":1.4}
{"mode":"staging","direction":"rx","size":1500,"pps":9e6}
{"peer":"memif","direction":"rx","size":1500,"pps":8e6}
{"peer":"ringfence-nbd","iops":30000.0,"p99_us":2.0}
{"peer":"nbdkit","iops":90000.0,"p99_us":1.0}
{"peer":"ringfence","case":"tcp-rr","p50_us":36.0}
{"peer":"pasta","case":"tcp-rr","p50_us":73.0}
{"peer":"ringfence","case":"tcp-stream","mtu":65520,"streams":1,"direction":"ns-host","gbps":19.7}
{"peer":"veth","case":"tcp-crr","per_second":13000.0}
{"kind":"path","name":"uplink","size":1500,"cycles":9000.0}
{"kind":"component","name":"one more distrusting domain","size":1500,"cycles":900.0}
{"kind":"component","name":"policy","size":1500,"cycles":-3.0}
{"kind":"alone","name":"copy from a lent page","size":1500,"cycles":120.0}
{"behaviour":"absent","p50_us":20.0,"p99_us":30.0,"p999_us":40.0,"p999_ratio":1.0}
{"behaviour":"honest","p50_us":21.0,"p99_us":31.0,"p999_us":41.0,"p999_ratio":1.1}
{"behaviour":"event-storm","p50_us":22.0,"p99_us":32.0,"p999_us":44.0,"p999_ratio":1.2}
{"behaviour":"deaf","p50_us":25.0,"p99_us":29.0,"p999_us":42.0,"p999_ratio":1.3}
"#;

    #[test]
    fn charts_show_the_rows_of_their_commands() {
        let rounds = Rounds(vec![parse(ROWS).unwrap()]);
        let mut found = Vec::new();
        for section in &SECTIONS {
            for chart in (section.charts)(&rounds).into_iter().flatten() {
                for group in &chart.groups {
                    for bar in &group.bars {
                        let value = (bar.values[0] * 1000.0).round() / 1000.0;
                        found.push((chart.id.clone(), bar.name.clone(), value, bar.published));
                    }
                }
            }
        }
        let found: Vec<_> = found
            .iter()
            .map(|(chart, bar, value, published)| {
                (chart.as_str(), bar.as_str(), *value, *published)
            })
            .collect();
        let scaled = 400_000.0 / 650_000.0;
        let wanted = [
            ("scaling", "map", 0.8, Some(scaled)),
            ("scaling", "persistent", 2.0, None),
            ("modes", "5 guests", 2.0, None),
            ("modes", "10 guests", 5.0, None),
            ("packets", "staging by copy", 5.0, Some(3.64)),
            ("stream", "super-packets", 8.0, Some(5.18)),
            ("throughput", "window by original", 1.5, Some(1.18)),
            ("cost", "window by original", 0.6, Some(0.69)),
            ("stream", "without offloads", 0.9, Some(1.4)),
            ("packets", "ringfence, staging", 9.0, None),
            ("packets", "memif", 8.0, None),
            ("requests", "ringfence run --disk", 30_000.0, None),
            ("requests", "nbdkit", 90_000.0, None),
            ("p99", "ringfence run --disk", 2.0, None),
            ("p99", "nbdkit", 1.0, None),
            ("stream", "ringfence", 19.7, None),
            ("connections", "veth", 13_000.0, None),
            ("request", "ringfence", 36.0, None),
            ("request", "pasta", 73.0, None),
            ("cycles-1500", "one more distrusting domain", 900.0, Some(1500.0)),
            ("cycles-1500", "policy", 0.0, None),
            ("cycles-1500", "copy from a lent page", 120.0, Some(1000.0)),
            ("ratio", "honest", 1.1, None),
            ("ratio", "event-storm", 1.2, None),
            ("ratio", "deaf", 1.3, None),
            ("latency", "alone", 20.0, None),
            ("latency", "beside an honest one", 21.0, None),
            ("latency", "beside the worst hostile one", 25.0, None),
            ("latency", "alone", 30.0, None),
            ("latency", "beside an honest one", 31.0, None),
            ("latency", "beside the worst hostile one", 32.0, None),
            ("latency", "alone", 40.0, None),
            ("latency", "beside an honest one", 41.0, None),
            ("latency", "beside the worst hostile one", 44.0, None),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn charts_of_a_section_have_names_that_differ() {
        let rounds = Rounds(vec![parse(ROWS).unwrap()]);
        for section in &SECTIONS {
            let charts: Vec<BarChart> = (section.charts)(&rounds).into_iter().flatten().collect();
            let ids: HashSet<&str> = charts.iter().map(|chart| chart.id.as_str()).collect();
            assert!(!charts.is_empty() && ids.len() == charts.len(), "{}", section.title);
        }
    }

    #[test]
    fn missing_prerequisite_is_named() {
        let spec = Spec { needs: &[Need::Device("/dev/ringfence-none")], ..SECTIONS[0] };
        assert_eq!(spec.missing().as_deref(), Some("there is no /dev/ringfence-none"));
        let spec = Spec { peers: &[("a", "ringfence-no-such")], ..SECTIONS[0] };
        assert_eq!(spec.missing().as_deref(), Some("ringfence-no-such is not installed"));
        assert_eq!(SECTIONS[0].missing(), None);
    }
}

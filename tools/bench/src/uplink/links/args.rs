//! Command line of `bench seeds vhost`.

use std::time::Duration;

use clap::Args;

use super::super::super::params::parse_seconds;

const NOTES: &str = "\
One TCP stream in each direction between a network namespace and the loopback interface of another
one, through an uplink that is a thread of this program: once by reads and writes of a TAP, once by
kernel vhost-net. Packets are as the guest's kernel makes them (`whole`: super-packets without
checksums) or without offloads, as programs took them when the experiment was published (`none`:
each packet is segmented and has its checksum). Needs root and /dev/vhost-net.

`calls/MiB`: system calls of the uplink for each MiB, all of them and those of the link alone. The
others are those of sockets, the same with either link. `cpu`: processor time of all processes and
kernel threads that take part.";

/// TCP to and from a namespace by reads and writes of a TAP, and by kernel vhost-net
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct LinksArgs {
    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Measurements of each row; the median is printed
    #[arg(long, value_name = "N", default_value = "3",
          value_parser = clap::value_parser!(u8).range(1..))]
    pub rounds: u8,

    /// Bytes of a packet after its Ethernet header
    #[arg(long = "mtu", value_name = "BYTES", value_delimiter = ',', default_value = "65520,1500",
          value_parser = clap::value_parser!(u16).range(1280..=65520))]
    pub mtus: Vec<u16>,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

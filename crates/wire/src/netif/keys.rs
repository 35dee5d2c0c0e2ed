//! Names of the keys of a vif in the store. Feature keys are `0` or `1`.
//!
//! With one queue the ring and event keys are at the top of the frontend's directory; with several
//! they must not be there, but in [`queue_directory`].

/// Either end: accepts packets of several fragments. Absent: no.
pub const FEATURE_SG: &str = "feature-sg";
/// Either end: accepts large TCP packets over IPv4. Absent: no.
pub const FEATURE_GSO_TCPV4: &str = "feature-gso-tcpv4";
/// Either end: accepts large TCP packets over IPv6. Absent: no.
pub const FEATURE_GSO_TCPV6: &str = "feature-gso-tcpv6";
/// Either end: `1` says that IPv4 checksums cannot be left blank. Absent: they can.
pub const FEATURE_NO_CSUM_OFFLOAD: &str = "feature-no-csum-offload";
/// Either end: IPv6 checksums can be left blank. Absent: they cannot.
pub const FEATURE_IPV6_CSUM_OFFLOAD: &str = "feature-ipv6-csum-offload";

/// Backend: copies packets into the pages of rx requests.
pub const FEATURE_RX_COPY: &str = "feature-rx-copy";
/// Backend: gives pages away on rx (a dead mode).
pub const FEATURE_RX_FLIP: &str = "feature-rx-flip";
/// Backend: can filter multicast packets; asked for before Connected.
pub const FEATURE_MULTICAST_CONTROL: &str = "feature-multicast-control";
/// Backend: the multicast filter may be asked for at any time.
pub const FEATURE_DYNAMIC_MULTICAST_CONTROL: &str = "feature-dynamic-multicast-control";
/// Backend: takes an event channel for each ring.
pub const FEATURE_SPLIT_EVENT_CHANNELS: &str = "feature-split-event-channels";
/// Backend: most queues. Absent: 1.
pub const MULTI_QUEUE_MAX_QUEUES: &str = "multi-queue-max-queues";
/// Backend: has a control ring.
pub const FEATURE_CTRL_RING: &str = "feature-ctrl-ring";
/// Backend, our own: `1` if it opens the windows of queues ([`RINGFENCE_TX_WINDOW`]). Absent: it does not.
pub const FEATURE_RINGFENCE_WINDOW: &str = "feature-ringfence-window";
/// Backend: `0` while the link is down. Absent: up.
pub const CARRIER: &str = "carrier";
/// Backend, by the toolstack: `connected` once the interface is wired up.
pub const HOTPLUG_STATUS: &str = "hotplug-status";

/// Frontend: gref of the tx ring.
pub const TX_RING_REF: &str = "tx-ring-ref";
/// Frontend: gref of the rx ring.
pub const RX_RING_REF: &str = "rx-ring-ref";
/// Frontend: the event channel of both rings.
pub const EVENT_CHANNEL: &str = "event-channel";
/// Frontend: the event channel of the tx ring.
pub const EVENT_CHANNEL_TX: &str = "event-channel-tx";
/// Frontend: the event channel of the rx ring.
pub const EVENT_CHANNEL_RX: &str = "event-channel-rx";
/// Frontend, our own, for each queue: the window that its tx ring's references with bit 31 are in. Absent:
/// there is none.
pub const RINGFENCE_TX_WINDOW: &str = "ringfence-tx-window";
/// Frontend, our own, for each queue: the window of the rx ring.
pub const RINGFENCE_RX_WINDOW: &str = "ringfence-rx-window";
/// Frontend: wants packets copied into its pages.
pub const REQUEST_RX_COPY: &str = "request-rx-copy";
/// Frontend: notifies after it posted rx requests.
pub const FEATURE_RX_NOTIFY: &str = "feature-rx-notify";
/// Frontend: wants multicast packets filtered.
pub const REQUEST_MULTICAST_CONTROL: &str = "request-multicast-control";
/// Frontend: queues used. Absent: 1.
pub const MULTI_QUEUE_NUM_QUEUES: &str = "multi-queue-num-queues";
/// Frontend: gref of the control ring.
pub const CTRL_RING_REF: &str = "ctrl-ring-ref";
/// Frontend: event channel of the control ring.
pub const EVENT_CHANNEL_CTRL: &str = "event-channel-ctrl";

/// By the toolstack: the Ethernet address, as `aa:bb:cc:dd:ee:ff`.
pub const MAC: &str = "mac";
/// By the toolstack, for the backend: how much the guest may send, as `BYTES,MICROSECONDS`. Absent: no
/// limit.
pub const RATE: &str = "rate";
/// By the toolstack: number of the device in its domain.
pub const HANDLE: &str = "handle";
/// By the toolstack, in the frontend's directory: the MTU. Absent: 1500.
pub const MTU: &str = "mtu";
/// By the toolstack, in the frontend's directory: `0` if the backend is not to be trusted.
pub const TRUSTED: &str = "trusted";

/// The MTU when the key [`MTU`] is absent.
pub const MTU_DEFAULT: u16 = 1500;

/// The directory of a queue, below the frontend's, when there are several.
pub fn queue_directory(queue: u32) -> String {
    format!("queue-{queue}")
}

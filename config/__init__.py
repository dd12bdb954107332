"""Facts both sides share: settings, model description, arena geometry, topology, messages, errors."""

"""Host-memory copies (TTP_HOST_COPY): every few steps each rank copies its state to memory that its agent
holds, and the next start of the workers makes a checkpoint of it where the job was saved later by nobody."""
